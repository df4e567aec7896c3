//! The faults that were carried out, and the violations that were found.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use crate::checkers::{self, Violation};
use crate::faults::{Kind, Menu};
use crate::history::{Ask, History, Told};
use crate::honesty::Outcomes;

/// How many of a round's violations are shown.
const SHOWN: usize = 5;

#[derive(Debug)]
pub(crate) struct Round {
    number: u64,
    menu: Menu,
    pub(crate) faults: BTreeMap<Kind, usize>,
    figures: Figures,
    /// By the checker that found it.
    found: Vec<(&'static str, Violation)>,
    left: Vec<String>,
}

/// How many of what.
#[derive(Debug, Default, Clone, Copy)]
struct Figures {
    asked: usize,
    granted: usize,
    /// Permits, those that were asked for again among them.
    permits: usize,
    entered: usize,
    refused: usize,
    released: usize,
    never_told: usize,
    looks: usize,
    beliefs: usize,
}

impl Round {
    pub(crate) fn new(number: u64, menu: Menu) -> Self {
        Self {
            number,
            menu,
            faults: BTreeMap::new(),
            figures: Figures::default(),
            found: Vec::new(),
            left: Vec::new(),
        }
    }

    /// Has every checker look at the history. One in which something is wrong is kept.
    pub(crate) fn check(&mut self, history: &History, lines: &[String], left: Vec<String>) {
        self.figures = Figures::of(history);
        for (name, checker) in checkers::ALL {
            self.found
                .extend(checker(history).into_iter().map(|found| (name, found)));
        }
        self.left = left;
        if self.found.is_empty() && self.left.is_empty() {
            return;
        }
        let path = format!(
            "{}/chaos-round-{}.history",
            env!("CARGO_TARGET_TMPDIR"),
            self.number
        );
        fs::write(&path, lines.join("\n")).expect("a file");
        for (checker, violation) in self.found.iter().take(SHOWN) {
            println!(
                "{checker}: {}\n{}",
                violation.what,
                excerpt(violation, lines)
            );
        }
        println!("the whole history: {path}");
    }
}

/// The lines that speak of those a violation speaks of, and the faults around it.
fn excerpt(violation: &Violation, lines: &[String]) -> String {
    let is_name = |word: &&str| word.contains(['-', ':']) && word.len() > 2;
    let named = violation
        .what
        .split(|char: char| !(char.is_alphanumeric() || "-:_".contains(char)));
    let named: Vec<_> = named
        .map(|word| word.trim_end_matches(':'))
        .filter(is_name)
        .collect();
    let mut ids: Vec<&str> = Vec::new();
    let mut seen = "";
    let of_them = lines.iter().filter(|line| {
        let words: Vec<_> = line.split([' ', ',', '/']).collect();
        let speaks = words.iter().any(|word| named.contains(word));
        if speaks && words[0] == "ask" {
            ids.push(words[1]);
        }
        let is_near = || {
            let times = words
                .iter()
                .skip(1)
                .take(2)
                .filter_map(|word| word.parse().ok());
            let mut times = times.map(|at: u64| at.abs_diff(violation.at));
            times.any(|away| away < 3_000_000)
        };
        match words[0] {
            "told" | "queued" => ids.contains(&words[1]),
            "fault" => is_near(),
            "info" if speaks && is_near() => {
                // Only the changes.
                let before = std::mem::replace(&mut seen, line.splitn(4, ' ').last().unwrap());
                before != seen
            }
            "info" => false,
            _ => speaks,
        }
    });
    let shown: Vec<_> = of_them.take(40).map(|line| format!("    {line}")).collect();
    shown.join("\n")
}

impl Figures {
    fn of(history: &History) -> Self {
        let mut figures = Self {
            asked: history.operations.len(),
            looks: history.samples.len(),
            beliefs: history.beliefs.len(),
            ..Self::default()
        };
        for operation in &history.operations {
            let told = operation.told.as_ref().map(|(_, told)| told);
            let counter = match (operation.ask, told) {
                (_, None) => &mut figures.never_told,
                (_, Some(Told::Held { .. })) if operation.mode.is_permits() => &mut figures.permits,
                (_, Some(Told::Held { count: 1, .. })) => &mut figures.granted,
                (_, Some(Told::Held { .. } | Told::Entered { .. })) => &mut figures.entered,
                (_, Some(Told::Refused | Told::Error | Told::Lost)) => &mut figures.refused,
                (Ask::Release, Some(_)) => &mut figures.released,
                _ => continue,
            };
            *counter += 1;
        }
        figures
    }

    fn add(&mut self, other: Self) {
        self.asked += other.asked;
        self.granted += other.granted;
        self.permits += other.permits;
        self.entered += other.entered;
        self.refused += other.refused;
        self.released += other.released;
        self.never_told += other.never_told;
        self.looks += other.looks;
        self.beliefs += other.beliefs;
    }
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    rounds: Vec<Round>,
    pub(crate) honesty: Option<Outcomes>,
}

impl Report {
    pub(crate) fn add(&mut self, round: Round) {
        self.rounds.push(round);
    }

    /// All that is not as it must be.
    pub(crate) fn verdict(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for round in &self.rounds {
            let found = round
                .found
                .iter()
                .map(|(by, found)| format!("{by}: {}", found.what));
            let all = found.chain(round.left.iter().cloned());
            wrong.extend(all.map(|what| format!("round {}: {what}", round.number)));
        }
        if let Some(Outcomes {
            trusting,
            with_token,
            with_guard,
            ..
        }) = &self.honesty
        {
            if trusting.lost == 0 {
                wrong.push("a set guarded by the lock alone lost nothing: a weak test".to_owned());
            }
            if with_token.lost > 0 || with_token.refused == 0 {
                wrong.push(format!("a set guarded by the token: {with_token:?}"));
            }
            if with_guard.lost > 0 || with_guard.refused == 0 {
                wrong.push(format!("a set with guarded commands: {with_guard:?}"));
            }
        }
        wrong
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = Figures::default();
        let mut faults: BTreeMap<Kind, usize> = BTreeMap::new();
        writeln!(f, "\nrounds")?;
        for menu in Menu::ALL {
            let rounds = self.rounds.iter().filter(|round| round.menu == menu);
            writeln!(f, "  {:<44} {:>9}", menu.name(), rounds.count())?;
        }
        for round in &self.rounds {
            all.add(round.figures);
            for (kind, count) in &round.faults {
                *faults.entry(*kind).or_default() += count;
            }
        }
        writeln!(f, "operations")?;
        for (what, count) in [
            ("asked", all.asked),
            ("granted", all.granted),
            ("granted permits", all.permits),
            ("entered again", all.entered),
            ("released", all.released),
            ("refused, timed out, lost", all.refused),
            ("never answered", all.never_told),
            ("looks at a lock from outside", all.looks),
            ("looks at a guard", all.beliefs),
        ] {
            writeln!(f, "  {what:<44} {count:>9}")?;
        }
        writeln!(f, "faults {:>48}", faults.values().sum::<usize>())?;
        for (kind, count) in faults {
            writeln!(f, "  {:<44} {count:>9}", kind.title())?;
        }
        writeln!(f, "violations")?;
        for (name, _) in checkers::ALL {
            let found = self.rounds.iter().flat_map(|round| &round.found);
            let count = found.filter(|(by, _)| *by == name).count();
            writeln!(f, "  {name:<44} {count:>9}")?;
        }
        let left: usize = self.rounds.iter().map(|round| round.left.len()).sum();
        writeln!(
            f,
            "  {:<44} {left:>9}",
            "nothing left, nobody stuck at the end"
        )?;
        let Some(honesty) = &self.honesty else {
            return Ok(());
        };
        writeln!(
            f,
            "a set, and {} times a process stopped for longer than its lease",
            honesty.stops
        )?;
        for (what, outcome) in [
            (
                "by the lock alone, which is expected to fail",
                &honesty.trusting,
            ),
            ("by the token, which must hold", &honesty.with_token),
            ("by guarded commands, which must hold", &honesty.with_guard),
        ] {
            writeln!(
                f,
                "  {what:<44} {:>9} added, {} refused, {} lost",
                outcome.added, outcome.refused, outcome.lost
            )?;
        }
        Ok(())
    }
}
