//! `make exhaust`: each small program with every fault at every step (`EXHAUST=singles`), or with
//! every pair of faults at every pair of steps (`EXHAUST=pairs`), or one part of that
//! (`SHARD=i/n`), or a sample of the pairs (`EVERY=n`). `EXHAUST=equal` is in `equal.rs`,
//! `EXHAUST=show` shows them without a fault, and `EXHAUST_ONLY=` is a part of their names. With a
//! file of progress (`PROGRESS=`) it goes on where it was ended.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rlock_simulation::every::{self, Coming, Possible};
use rlock_simulation::judge::Report;
use rlock_simulation::run::{run, with_steps};
use rlock_simulation::scenarios::{self, Scenario};
use rlock_simulation::schedule::{Fault, Schedule};
use rlock_simulation::shrink::shrink;
use rlock_simulation::steps::settle;
use serde::{Deserialize, Serialize};

use crate::{equal, locked, text, write_schedule};

/// A program, its possible faults, and its run without a fault.
pub(crate) struct Program {
    pub(crate) scenario: Scenario,
    pub(crate) faults: Vec<Possible>,
    pub(crate) report: Report,
}

/// A fault of a program, by numbers: with it a schedule begins.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub(crate) program: usize,
    pub(crate) step: usize,
    pub(crate) fault: usize,
}

/// The result of one program so far. While singles are carried out pairs are counted.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Count {
    singles: u64,
    pairs: u64,
    violations: u64,
}

/// The progress of a part, as it is kept in the file of progress.
#[derive(Default, Serialize, Deserialize)]
struct Progress {
    /// Names the part of the work that the progress belongs to.
    of: String,
    /// The number of units of this part that are done.
    done: usize,
    counts: BTreeMap<String, Count>,
    seconds: f64,
    /// The reports so far, without their numbers.
    reported: BTreeSet<String>,
}

impl Progress {
    fn violations(&self) -> u64 {
        self.counts.values().map(|count| count.violations).sum()
    }
}

/// The settings of a run.
struct Settings {
    pairs: bool,
    /// The number of this part, and how many there are.
    shard: (usize, usize),
    progress: Option<String>,
    /// Programs whose names contain this.
    only: String,
    /// End with the first violation.
    is_brief: bool,
    /// A sample: with 500, every 500th of the pairs that begin with a fault. 1 is all of them.
    every: usize,
    /// End after this time.
    time: Duration,
}

impl Settings {
    fn read(what: &str) -> Option<Self> {
        let number = |text: &str| text.parse::<usize>().ok();
        let shard = text("SHARD").unwrap_or_else(|| "1/1".to_owned());
        let (part, parts) = shard.split_once('/')?;
        let (part, parts) = (number(part)?, number(parts)?);
        let is_part = part >= 1 && part <= parts;
        let time = text("EXHAUST_SECONDS").and_then(|text| text.parse().ok());
        is_part.then(|| Self {
            pairs: what == "pairs",
            shard: (part - 1, parts),
            progress: text("PROGRESS"),
            only: text("EXHAUST_ONLY").unwrap_or_default(),
            is_brief: text("SIMULATE_BRIEF").is_some(),
            every: text("EVERY")
                .and_then(|text| number(&text))
                .unwrap_or(1)
                .max(1),
            time: time.map_or(Duration::MAX, Duration::from_secs),
        })
    }
}

/// All that is asked for.
pub(crate) fn exhaust(what: &str) -> ExitCode {
    let Some(settings) = Settings::read(what) else {
        println!("SHARD= must be as 1/8");
        return ExitCode::FAILURE;
    };
    let programs = programs(&settings.only);
    if what == "show" {
        show(&programs);
        return ExitCode::SUCCESS;
    }
    if what == "equal" {
        return equal::compare(&programs, settings.every);
    }
    let all = units(&programs);
    let (part, parts) = settings.shard;
    let order = if settings.pairs {
        mixed(&all)
    } else {
        all.clone()
    };
    let own: Vec<_> = order.into_iter().skip(part).step_by(parts).collect();
    let kind = if settings.pairs { "pairs" } else { "singles" };
    let mut progress = load(&settings);
    // Other programs or faults are other work.
    let mut digest = DefaultHasher::new();
    for Program {
        scenario, faults, ..
    } in &programs
    {
        format!("{:?} {faults:?}", scenario.schedule).hash(&mut digest);
    }
    let (count, only, digest) = (all.len(), &settings.only, digest.finish());
    let mut of = format!("{kind} {part}/{parts} of {count} {only} {digest:x}");
    if settings.every > 1 {
        of = format!("one in {} {of}", settings.every);
    }
    if progress.done > 0 && progress.of != of {
        println!("the file of progress is of other work: {}", progress.of);
        return ExitCode::FAILURE;
    }
    progress.of = of;
    go_on(&programs, &own, &settings, &mut progress);
    table(&programs, &progress, &settings, own.len());
    let alone = programs.iter().all(|of| of.report.violations.is_empty());
    if alone && !programs.is_empty() && progress.violations() == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Carries out the units that are not done yet.
fn go_on(programs: &[Program], units: &[Unit], settings: &Settings, progress: &mut Progress) {
    let (began, before) = (Instant::now(), progress.seconds);
    let (mut told, mut since) = (Instant::now(), progress.done);
    let batch = if settings.pairs { 64 } else { 1_000 };
    while progress.done < units.len() && began.elapsed() < settings.time {
        let end = units.len().min(progress.done + batch);
        carry_out(programs, &units[progress.done..end], settings, progress);
        progress.done = end;
        progress.seconds = before + began.elapsed().as_secs_f64();
        keep(settings, progress);
        if settings.is_brief && progress.violations() > 0 {
            return;
        }
        if told.elapsed() > TOLD_EVERY {
            tell(progress, settings.pairs, units.len(), (told, since));
            (told, since) = (Instant::now(), progress.done);
        }
    }
}

/// The time between two reports of its progress.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Each program, without a fault. There nothing may be wrong.
fn programs(only: &str) -> Vec<Program> {
    let all = scenarios::all().into_iter();
    let meant = all.filter(|scenario| scenario.name.contains(only));
    let programs = meant.map(|scenario| {
        let report = with_steps(&scenario.schedule);
        for violation in &report.violations {
            println!("{}, without a fault: {violation}", scenario.name);
        }
        Program {
            faults: every::faults(&scenario.schedule),
            report,
            scenario,
        }
    });
    programs.collect()
}

/// Shows the runs of programs without a fault.
fn show(programs: &[Program]) {
    for program in programs {
        let Scenario {
            name,
            story,
            schedule,
        } = &program.scenario;
        println!("{name}: {story}\n{schedule}");
        for line in run(schedule, true).trace {
            println!("{line}");
        }
    }
}

/// Every fault at every step.
pub(crate) fn units(programs: &[Program]) -> Vec<Unit> {
    let mut units = Vec::new();
    for (program, of) in programs.iter().enumerate() {
        let coming = every::coming(&of.faults, &of.report.steps, None).into_iter();
        let coming = coming.filter(|coming| coming.is_as_at.is_none());
        units.extend(coming.map(|Coming { step, fault, .. }| Unit {
            program,
            step,
            fault,
        }));
    }
    units
}

/// The programs take turns. If the work is ended early, all of them have been sampled.
pub(crate) fn mixed(units: &[Unit]) -> Vec<Unit> {
    // A prime, so that each has its turn once.
    let places = (0..units.len()).map(|place| place * 1_000_003 % units.len());
    places.map(|place| units[place]).collect()
}

/// The schedule with one more fault, at a step of its run.
pub(crate) fn with_fault(
    schedule: &Schedule,
    report: &Report,
    step: usize,
    fault: Fault,
) -> Schedule {
    let mut schedule = schedule.clone();
    let at = report.steps[step].at;
    let step = Some(step);
    schedule.faults.push(Fault { at, step, ..fault });
    schedule
}

/// The result of a unit.
#[derive(Default)]
struct Shown {
    schedules: u64,
    /// The number of pairs that begin with this single and are not carried out.
    pairs: u64,
    wrong: Vec<(Schedule, Vec<String>)>,
}

impl Shown {
    fn add(&mut self, schedule: &Schedule, report: &Report) {
        self.schedules += 1;
        let mut violations = report.violations.clone();
        // A step of a run with a fault has the time that it had without.
        let is_late = |fault: &&Fault| {
            let step = fault.step.map(|step| report.steps.get(step));
            step.is_some_and(|step| step.is_none_or(|step| step.at != fault.at))
        };
        if let Some(fault) = schedule.faults.iter().find(is_late) {
            violations.push(format!("{fault:?} has not come at its time"));
        }
        if !violations.is_empty() {
            self.wrong.push((schedule.clone(), violations));
        }
    }
}

/// Carries units out, by all processors.
fn carry_out(programs: &[Program], units: &[Unit], settings: &Settings, progress: &mut Progress) {
    let shown = Mutex::new(BTreeMap::new());
    by_all_processors(units, |place, unit| {
        let of = one(programs, *unit, settings, place);
        locked(&shown).insert(place, of);
    });
    for (place, shown) in locked(&shown).iter() {
        let name = programs[units[*place].program].scenario.name;
        let count = progress.counts.entry(name.to_owned()).or_default();
        if settings.pairs {
            count.pairs += shown.schedules;
        } else {
            count.singles += shown.schedules;
            count.pairs += shown.pairs;
        }
        count.violations += u64::try_from(shown.wrong.len()).unwrap_or(u64::MAX);
        for (schedule, violations) in &shown.wrong {
            let pairs: u64 = progress.counts.values().map(|count| count.pairs).sum();
            let single = u64::try_from(progress.done + place + 1).unwrap_or(u64::MAX);
            let number = if settings.pairs { pairs } else { single };
            if settings.is_brief {
                // As a seed that fails.
                println!("single {number}: {name}: {}", violations[0]);
                return;
            }
            if progress.reported.insert(kind_of(name, &violations[0])) {
                report(name, schedule, violations);
            }
        }
    }
}

/// Does this with each of them.
pub(crate) fn by_all_processors<T: Sync>(all: &[T], does: impl Fn(usize, &T) + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(one) = all.get(place) else { return };
                    does(place, one);
                }
            });
        }
    });
}

/// One fault, or one fault with every fault after it.
fn one(programs: &[Program], unit: Unit, settings: &Settings, place: usize) -> Shown {
    let program = &programs[unit.program];
    let (schedule, fault) = (&program.scenario.schedule, program.faults[unit.fault].fault);
    let schedule = with_fault(schedule, &program.report, unit.step, fault);
    let report = with_steps(&schedule);
    let mut shown = Shown::default();
    if !settings.pairs {
        shown.add(&schedule, &report);
        let pairs = next_faults(program, unit, &report).len();
        shown.pairs = u64::try_from(pairs).unwrap_or(u64::MAX);
        return shown;
    }
    // Each unit has others in the sample.
    let every = settings.every;
    let first = (unit.step + unit.fault + place) % every;
    let next = next_faults(program, unit, &report).into_iter();
    for (step, fault) in next.skip(first).step_by(every) {
        let schedule = with_fault(&schedule, &report, step, fault);
        shown.add(&schedule, &run(&schedule, false));
    }
    shown
}

/// All that may go wrong after this fault, at the steps of the run with it.
fn next_faults(program: &Program, unit: Unit, report: &Report) -> Vec<(usize, Fault)> {
    let after = Some((unit.step, unit.fault));
    let coming = every::coming(&program.faults, &report.steps, after).into_iter();
    let coming = coming.filter(|coming| coming.is_as_at.is_none());
    let faults = coming.map(|coming| (coming.step, program.faults[coming.fault].fault));
    faults.collect()
}

/// Violations of one kind are shown once.
fn kind_of(name: &str, violation: &str) -> String {
    let words = violation.split(' ');
    let plain = words.filter(|word| !word.contains(|of: char| of.is_ascii_digit()));
    format!("{name}: {}", plain.collect::<Vec<_>>().join(" "))
}

/// Shows the shortest schedule that fails as this one does, and keeps it.
fn report(name: &str, schedule: &Schedule, violations: &[String]) {
    for violation in violations {
        println!("{name}: {violation}");
    }
    for fault in &schedule.faults {
        println!("    {fault:?}");
    }
    let fails = |schedule: &Schedule| {
        let settled = settle(schedule);
        settled.filter(|(_, report)| !report.violations.is_empty())
    };
    let shortest = shrink(schedule, |shorter| fails(shorter).is_some());
    let shortest = fails(&shortest).map_or(shortest, |(settled, _)| settled);
    println!("{shortest}");
    let number = fastrand::u32(..);
    write_schedule(&format!("{name}-{number}"), &shortest);
}

// --- What is kept and told -----------------------------------------------------------------------

fn load(settings: &Settings) -> Progress {
    let text = settings.progress.as_ref().map(fs::read_to_string);
    let text = text.and_then(Result::ok).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn keep(settings: &Settings, progress: &Progress) {
    let Some(path) = &settings.progress else {
        return;
    };
    let written = serde_json::to_string(progress).map(|text| {
        let new = format!("{path}.new");
        fs::write(&new, text).and_then(|()| fs::rename(&new, path))
    });
    if !matches!(written, Ok(Ok(()))) {
        println!("{path} cannot be written");
    }
}

fn tell(progress: &Progress, pairs: bool, units: usize, (told, since): (Instant, usize)) {
    let counts = progress.counts.values();
    let schedules: u64 = counts
        .map(|of| if pairs { of.pairs } else { of.singles })
        .sum();
    let done = u32::try_from(progress.done - since).unwrap_or(u32::MAX);
    let left = u32::try_from(units - progress.done).unwrap_or(u32::MAX);
    let seconds = told.elapsed().as_secs_f64() / f64::from(done.max(1)) * f64::from(left);
    println!(
        "{} of {units} faults at steps, {schedules} schedules, about {:.1} minutes left",
        progress.done,
        seconds / 60.0
    );
}

fn table(programs: &[Program], progress: &Progress, settings: &Settings, units: usize) {
    // Those that are not carried out are counted only.
    let pairs = if settings.pairs { "pairs" } else { "(pairs)" };
    println!(
        "{:<26} {:>6} {:>6} {:>9} {:>11} {:>10}",
        "scenario", "steps", "faults", "singles", pairs, "violations"
    );
    let mut sum = Count::default();
    for program in programs {
        let name = program.scenario.name;
        let count = progress.counts.get(name).copied().unwrap_or_default();
        let (steps, faults) = (program.report.steps.len(), program.faults.len());
        row(name, (steps, faults), count);
        sum.singles += count.singles;
        sum.pairs += count.pairs;
        sum.violations += count.violations;
    }
    let steps = programs.iter().map(|of| of.report.steps.len()).sum();
    row("all", (steps, 0), sum);
    let (part, parts) = settings.shard;
    let (done, seconds) = (progress.done, progress.seconds);
    println!(
        "part {} of {parts}: {done} of {units} faults at steps, in {seconds:.0} s",
        part + 1
    );
}

fn row(name: &str, (steps, faults): (usize, usize), of: Count) {
    println!(
        "{name:<26} {steps:>6} {faults:>6} {:>9} {:>11} {:>10}",
        of.singles, of.pairs, of.violations
    );
}
