//! Making a schedule that fails as short as it can be and still fail.

use crate::permits::Asked;
use crate::schedule::{Schedule, Step};

/// Leaves out all parts without which it still fails.
pub fn shrink(schedule: &Schedule, fails: impl Fn(&Schedule) -> bool) -> Schedule {
    let mut shortest = schedule.clone();
    let mut place = 0;
    // A pass over all parts that leaves nothing out is the last.
    let mut since_shorter = 0;
    while since_shorter <= parts(&shortest) {
        match without(&shortest, place) {
            Some(shorter) if fails(&shorter) => {
                shortest = shorter;
                since_shorter = 0;
            }
            Some(_) => {
                place += 1;
                since_shorter += 1;
            }
            None => {
                place = 0;
                since_shorter += 1;
            }
        }
    }
    shortest
}

fn parts(schedule: &Schedule) -> usize {
    let steps = schedule.tasks.iter().flat_map(|task| &task.steps);
    let options: usize = steps.map(options_of).sum();
    schedule.tasks.len() + schedule.size() + options
}

/// An optional part of a step: whether the step has it, and how to leave it out.
type Part = (fn(&Step) -> bool, fn(&mut Step));

const OPTIONS: [Part; 11] = [
    (|step| many(step).is_some(), take_one),
    (|step| step.stop.is_some(), |step| step.stop = None),
    (|step| step.ahead.is_some(), |step| step.ahead = None),
    (|step| step.kept.is_some(), |step| step.kept = None),
    (|step| step.renews, |step| step.renews = false),
    (|step| step.downgrades, |step| step.downgrades = false),
    (|step| step.listens.is_some(), |step| step.listens = None),
    (|step| step.calls > 0, |step| step.calls = 0),
    (|step| step.lease.is_some(), |step| step.lease = None),
    (
        |step| step.drop_after.is_some(),
        |step| step.drop_after = None,
    ),
    (
        |step| step.drop_when_woken.is_some(),
        |step| step.drop_when_woken = None,
    ),
];

fn many(step: &Step) -> Option<Asked> {
    step.asked.filter(|asked| asked.permits > 1)
}

fn take_one(step: &mut Step) {
    if let Some(asked) = &mut step.asked {
        asked.permits = 1;
    }
}

fn options_of(step: &Step) -> usize {
    let own = OPTIONS.iter().filter(|(has, _)| has(step)).count();
    own + step.inside.iter().map(options_of).sum::<usize>()
}

/// The same without one part: a fault, a limit, a task, a step, an option of a step.
fn without(schedule: &Schedule, place: usize) -> Option<Schedule> {
    let mut shorter = schedule.clone();
    if place < shorter.faults.len() {
        shorter.faults.remove(place);
        return Some(shorter);
    }
    let place = place - shorter.faults.len();
    if place < shorter.limits.len() {
        shorter.limits.remove(place);
        return Some(shorter);
    }
    let place = place - shorter.limits.len();
    if place < shorter.tasks.len() {
        shorter.tasks.remove(place);
        return Some(shorter);
    }
    let mut place = place - shorter.tasks.len();
    let removed = shorter
        .tasks
        .iter_mut()
        .any(|task| remove_step(&mut task.steps, &mut place));
    let removed = removed
        || shorter
            .tasks
            .iter_mut()
            .any(|task| remove_option(&mut task.steps, &mut place));
    removed.then_some(shorter)
}

fn remove_option(steps: &mut [Step], place: &mut usize) -> bool {
    steps.iter_mut().any(|step| {
        for (has, leave_out) in OPTIONS {
            if has(step) {
                if *place == 0 {
                    leave_out(step);
                    return true;
                }
                *place -= 1;
            }
        }
        remove_option(&mut step.inside, place)
    })
}

fn remove_step(steps: &mut Vec<Step>, place: &mut usize) -> bool {
    for index in 0..steps.len() {
        if *place == 0 {
            steps.remove(index);
            return true;
        }
        *place -= 1;
        if let Some(step) = steps.get_mut(index)
            && remove_step(&mut step.inside, place)
        {
            return true;
        }
    }
    false
}
