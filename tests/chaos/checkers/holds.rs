//! How long who surely held what.
//!
//! A grant is proven by its answer, so from then on. It surely lasts until the lease could have run
//! out (counted from when the lease was *asked* for), until its owner asked for its last release,
//! or until something happened that may end it; and, whatever happened, up to the moment in which a
//! later command was sent whose answer says that the same hold was still there.

use std::collections::BTreeMap;

use crate::history::{Ask, History, MS, Mode, Operation, Time, Told, is_one_session, is_part_of};

/// One hold of one lock.
#[derive(Debug, Clone)]
pub(crate) struct Hold<'a> {
    pub(crate) lock: &'a str,
    pub(crate) owner: &'a str,
    pub(crate) mode: Mode,
    pub(crate) token: u64,
    pub(crate) asked: Time,
    pub(crate) told: Time,
    pub(crate) until: Time,
}

/// A server rounds the present down to a millisecond.
const ROUNDING: Time = 2 * MS;

/// After a fault that may break connections, clients connect again, and servers release the holds
/// of those that do not.
pub(crate) const SETTLING: Time = 3_000 * MS;

/// How long a guard may still say "held" after another client ended its hold: the
/// grace of the clients that have guards, and time to say so.
const BELIEF: Time = 1_100 * MS;

/// The commands of one owner in one mode on one lock, in the order in which they were sent. An
/// owner sends one after the other.
pub(crate) type Series<'a> = Vec<&'a Operation>;

pub(crate) fn series(history: &History) -> BTreeMap<(&str, &str, Mode), Series<'_>> {
    let mut all: BTreeMap<_, Series<'_>> = BTreeMap::new();
    for operation in &history.operations {
        for lock in &operation.locks {
            let key = (lock.as_str(), operation.owner.as_str(), operation.mode);
            all.entry(key).or_default().push(operation);
        }
    }
    for series in all.values_mut() {
        series.sort_by_key(|operation| operation.asked);
    }
    all
}

pub(crate) fn holds(history: &History) -> Vec<Hold<'_>> {
    let mut found = Vec::new();
    for ((lock, owner, mode), series) in series(history) {
        let mut now: Option<Lasting<'_>> = None;
        for operation in series {
            now = match now.take() {
                Some(lasting) if lasting.is_unclear_after(history, operation) => {
                    // The proof up to here stands; nothing later is followed.
                    now = Some(lasting.until_asked(operation));
                    break;
                }
                Some(lasting) => lasting.follow(history, operation, &mut found),
                None => Lasting::begin(lock, owner, mode, operation),
            };
        }
        found.extend(now.map(|lasting| lasting.end(history)));
    }
    let mut believed: BTreeMap<(&str, &str, u64), Vec<Time>> = BTreeMap::new();
    for belief in &history.beliefs {
        let which = (belief.lock.as_str(), belief.owner.as_str(), belief.token);
        believed.entry(which).or_default().push(belief.at);
    }
    for hold in &mut found {
        let which = (hold.lock, hold.owner, hold.token);
        let beliefs = believed.get(&which).into_iter().flatten();
        let sound = beliefs.filter(|at| !may_be_mistaken(history, hold.lock, **at));
        hold.until = sound.copied().fold(hold.until, Time::max);
    }
    found
}

/// A hold as far as it has been followed.
#[derive(Debug)]
pub(crate) struct Lasting<'a> {
    hold: Hold<'a>,
    process: &'a str,
    of_session: bool,
    count: u32,
    /// The last moment in which it was surely there, and from which on something may end it.
    proven: Time,
    /// The earliest ends of its leases: a reader's entries have one each, other holds have one.
    leases: Vec<Time>,
}

impl<'a> Lasting<'a> {
    pub(crate) fn begin(
        lock: &'a str,
        owner: &'a str,
        mode: Mode,
        operation: &'a Operation,
    ) -> Option<Self> {
        let Ask::Acquire { lease, .. } = operation.ask else {
            return None;
        };
        let (told, count, token) = match operation.told {
            Some((told, Told::Held { count, token })) => (told, count, token),
            Some((told, Told::Entered { token })) => (told, 1, token),
            _ => return None,
        };
        let asked = operation.asked;
        Some(Self {
            hold: Hold {
                lock,
                owner,
                mode,
                token,
                asked,
                told,
                until: told,
            },
            process: &operation.process,
            of_session: operation.of_session,
            count,
            proven: asked,
            leases: vec![end_of(asked, lease)],
        })
    }

    /// Until when it surely lasts if its owner does nothing.
    pub(crate) fn surely_until(&self, history: &History) -> Time {
        let loss = self.first_loss(history).unwrap_or(Time::MAX);
        let expiry = self.leases.iter().copied().max().unwrap_or_default();
        self.proven.max(loss.min(expiry))
    }

    /// Whether a release may find that the entries which are left have ended: by their leases, or
    /// because the clock was set since the first of them was asked for.
    pub(crate) fn may_be_the_last(&self, history: &History, at: Time) -> bool {
        let left = self.leases.split_last().map_or(&[][..], |(_, left)| left);
        let was_set = || is_struck(history, "clock", self.hold.asked, at);
        self.hold.mode == Mode::Read && (left.iter().all(|end| *end < at) || was_set())
    }

    /// Whether the server may know of fewer entries: a replica that was promoted had missed
    /// them.
    pub(crate) fn may_be_fewer(&self, history: &History, at: Time) -> bool {
        is_struck(history, "promote", self.proven, at)
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn token(&self) -> u64 {
        self.hold.token
    }

    /// The first moment since the last proof in which another client may have ended it.
    fn first_loss(&self, history: &History) -> Option<Time> {
        let faults = history.faults.iter().filter(|fault| {
            let to = fault.to.as_deref();
            match fault.kind.as_str() {
                "clock" | "promote" | "flush" => fault.end >= self.proven,
                "break" | "del" => fault.end >= self.proven && to == Some(self.hold.lock),
                // The fault's line names the sessions that end together, and the time.
                "kill-replica" | "stop-replica" | "end-together" => false,
                // A session may be let go some time after its connection broke.
                _ => {
                    self.of_session
                        && fault.end + SETTLING >= self.proven
                        && to.is_none_or(|to| is_part_of(self.process, to))
                }
            }
        });
        // One that is going on already may end it from now on.
        let faults = faults.map(|fault| fault.begin.max(self.proven));
        let died = history.died.iter();
        let died = died.filter(|(_, process)| is_part_of(self.process, process));
        let closed = history.closed.get(self.process).into_iter().flatten();
        // An operator writes it down before it is so: one command more may have been in time. A
        // process begins another session, but this one is over.
        let for_good = is_one_session(self.process);
        let ends = died.map(|(at, _)| at).chain(closed);
        let ends = ends.filter(|at| self.of_session && (for_good || **at >= self.proven));
        faults.chain(ends.map(|at| self.proven.max(*at))).min()
    }

    /// Whether an answer about several locks leaves open what became of this one.
    pub(crate) fn is_unclear_after(&self, history: &History, operation: &Operation) -> bool {
        let count = operation.locks.len();
        match (operation.ask, &operation.told) {
            // If it had been lost it has a new token now, and its count began anew.
            (Ask::Acquire { .. }, Some((at, Told::Entered { .. }))) => {
                self.surely_until(history) <= *at
            }
            (Ask::Renew { .. }, Some((_, Told::Renewed(some) | Told::Gave(some))))
            | (Ask::Release, Some((_, Told::Gave(some)))) => {
                count > 1 && *some > 0 && *some as usize != count
            }
            _ => false,
        }
    }

    /// The proof that remains when the answer to a later request leaves this hold's fate open.
    fn until_asked(mut self, operation: &Operation) -> Self {
        self.end_by(operation.asked);
        self
    }

    /// It was there when this was sent, for the answer says so. But permits whose lease was over
    /// are held again when the clock is set back, so an answer says nothing about the time before.
    pub(crate) fn prove(&mut self, history: &History, asked: Time) {
        let was_set = is_struck(history, "clock", self.proven, asked);
        if !(was_set && self.hold.mode.is_permits()) {
            self.proven = self.proven.max(asked);
        }
    }

    /// Goes on with the owner's next command. A hold that is over goes to `found`.
    pub(crate) fn follow(
        mut self,
        history: &History,
        operation: &'a Operation,
        found: &mut Vec<Hold<'a>>,
    ) -> Option<Self> {
        let told = operation.told.as_ref().map(|(_, told)| told);
        match (operation.ask, told) {
            (Ask::Acquire { lease, .. }, Some(Told::Held { count, token })) => {
                // A writer's token is not known to a server that was started since.
                let the_same =
                    *token == self.hold.token || self.hold.mode == Mode::Write && *count > 1;
                if !the_same {
                    found.push(self.end(history));
                    let hold = &found[found.len() - 1];
                    return Self::begin(hold.lock, hold.owner, hold.mode, operation);
                }
                self.prove(history, operation.asked);
                self.count = *count;
                if self.hold.mode != Mode::Read {
                    self.leases.clear();
                }
                self.leases.push(end_of(operation.asked, lease));
            }
            (Ask::Acquire { lease, .. }, Some(Told::Entered { .. })) => {
                self.prove(history, operation.asked);
                self.count += 1;
                self.leases.clear();
                self.leases.push(end_of(operation.asked, lease));
            }
            (Ask::Release, Some(Told::Gave(_))) => {
                self.prove(history, operation.asked);
                self.count = self.count.saturating_sub(1);
            }
            (Ask::Renew { lease }, Some(Told::Renewed(renewed)))
                if *renewed as usize == operation.locks.len() =>
            {
                self.prove(history, operation.asked);
                self.leases.fill(end_of(operation.asked, lease));
            }
            (Ask::Release, Some(Told::Left(left))) => {
                self.prove(history, operation.asked);
                self.count = *left;
                if self.hold.mode == Mode::Read {
                    self.leases.pop();
                }
            }
            // Refused in words, or a lock that was not had: nothing has changed.
            (Ask::Acquire { .. }, Some(_)) | (_, Some(Told::Error)) => {}
            (Ask::Acquire { lease, .. } | Ask::Renew { lease }, None) => {
                self.end_by(end_of(operation.asked, lease));
            }
            (Ask::Release, None) => {
                self.end_by(operation.asked);
                self.count = self.count.saturating_sub(1);
            }
            (Ask::Renew { .. } | Ask::Release, Some(_)) => self.count = 0,
        }
        if self.count > 0 {
            return Some(self);
        }
        self.end_by(operation.asked);
        found.push(self.end(history));
        None
    }

    fn end_by(&mut self, at: Time) {
        self.leases.iter_mut().for_each(|end| *end = at.min(*end));
    }

    fn end(self, history: &History) -> Hold<'a> {
        let until = self.surely_until(history);
        Hold { until, ..self.hold }
    }
}

/// The earliest end of a lease that was asked for then.
fn end_of(asked: Time, lease: Time) -> Time {
    (asked + lease).saturating_sub(ROUNDING)
}

fn is_struck(history: &History, kind: &str, from: Time, to: Time) -> bool {
    let faults = history.faults.iter().filter(|fault| fault.kind == kind);
    let mut overlapping = faults.filter(|fault| fault.begin <= to && fault.end >= from);
    overlapping.next().is_some()
}

/// Whether a guard cannot know yet of the fault that its lock has met.
fn may_be_mistaken(history: &History, lock: &str, at: Time) -> bool {
    history.faults.iter().any(|fault| {
        let concerned = match fault.kind.as_str() {
            "clock" | "promote" | "flush" => true,
            "break" | "del" => fault.to.as_deref() == Some(lock),
            _ => false,
        };
        concerned && fault.begin <= at && at <= fault.end + BELIEF
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From when to when the one hold of a history surely lasts, in milliseconds.
    fn span(history: &str) -> (Time, Time) {
        let history = History::parse(history);
        let holds = holds(&history);
        assert_eq!(holds.len(), 1, "{holds:?}");
        (holds[0].told / MS, holds[0].until / MS)
    }

    const GRANT: &str = "ask 1.1 10000 a p0 plain free acquire 1000 none
         told 1.1 20000 held 1 7\n";
    const OF_SESSION: &str = "ask 1.1 10000 a p0 plain session acquire 1000 none
         told 1.1 20000 held 1 7\n";

    #[test]
    fn a_hold_lasts_for_its_lease_from_when_that_was_asked_for() {
        assert_eq!(span(GRANT), (20, 1008));
    }

    #[test]
    fn or_until_its_release_is_asked_for() {
        let release = "ask 1.2 500000 a p0 plain free release\n";
        assert_eq!(span(&format!("{GRANT}{release}")), (20, 500));
        // The answer says that it was still there, whatever the lease.
        let late = "ask 1.2 2000000 a p0 plain free release
             told 1.2 2001000 left 0";
        assert_eq!(span(&format!("{GRANT}{late}")), (20, 2000));
    }

    #[test]
    fn permits_that_a_clock_gave_back_were_not_held_all_the_time() {
        let release = "fault 300000 700000 clock
             ask 1.2 800000 a p0 plain free release
             told 1.2 801000 left 0";
        let history = format!("{GRANT}{release}");
        assert_eq!(span(&history), (20, 800));
        let permits = history
            .replace("plain", "permits:2")
            .replace("held 1", "held 2");
        assert_eq!(span(&permits), (20, 300));
    }

    #[test]
    fn a_renewal_counts_only_when_told_and_a_shorter_one_at_once() {
        let renew = "ask 1.2 500000 a p0 plain free renew 2000\n";
        assert_eq!(span(&format!("{GRANT}{renew}")), (20, 1008));
        let told = "told 1.2 510000 renewed 1\n";
        assert_eq!(span(&format!("{GRANT}{renew}{told}")), (20, 2498));
        let shorter = "ask 1.2 500000 a p0 plain free renew 100\n";
        assert_eq!(span(&format!("{GRANT}{shorter}")), (20, 598));
    }

    #[test]
    fn a_readers_entries_have_leases_of_their_own() {
        let reads = GRANT.replace("plain", "read");
        let again = "ask 1.2 500000 a p0 read free acquire 1000 none
             told 1.2 510000 held 2 7\n";
        assert_eq!(span(&format!("{reads}{again}")), (20, 1498));
        let release = "ask 1.3 600000 a p0 read free release
             told 1.3 610000 left 1\n";
        assert_eq!(span(&format!("{reads}{again}{release}")), (20, 1008));
        let plain = format!("{reads}{again}{release}").replace("read", "plain");
        assert_eq!(span(&plain), (20, 1498));
    }

    #[test]
    fn a_fault_that_may_end_the_hold_ends_the_proof() {
        assert_eq!(
            span(&format!("{GRANT}fault 300000 300000 break p0")),
            (20, 300)
        );
        assert_eq!(
            span(&format!("{GRANT}fault 300000 300000 break p1")),
            (20, 1008)
        );
        assert_eq!(
            span(&format!("{GRANT}fault 300000 400000 clock")),
            (20, 300)
        );
        assert_eq!(
            span(&format!("{GRANT}fault 300000 400000 sever 1")),
            (20, 1008)
        );
        assert_eq!(
            span(&format!("{OF_SESSION}fault 300000 400000 sever 1")),
            (20, 300)
        );
        assert_eq!(
            span(&format!("{OF_SESSION}fault 300000 400000 sever 2")),
            (20, 1008)
        );
        assert_eq!(span(&format!("{OF_SESSION}died 300000 1")), (20, 300));
        assert_eq!(
            span(&format!("{OF_SESSION}fault 5000 400000 sever 1")).1,
            10
        );
        assert_eq!(span(&format!("{OF_SESSION}closed 5000 1")), (20, 1008));
    }

    #[test]
    fn locks_held_before_are_reentered_and_one_hold_of_each_is_given_back() {
        let of_p0 = |history: &str| {
            let history = History::parse(history);
            let holds = holds(&history);
            let of_p0: Vec<_> = holds.iter().filter(|hold| hold.lock == "p0").collect();
            assert_eq!(of_p0.len(), 1, "{holds:?}");
            (of_p0[0].token, of_p0[0].until / MS)
        };
        let entered = format!(
            "{GRANT}ask 1.2 30000 a p0,p1 plain free acquire 2000 queue
             told 1.2 90000 entered 9\n"
        );
        assert_eq!(of_p0(&entered), (7, 2028));
        let gave = |count: u32| {
            format!(
                "{entered}ask 1.3 100000 a p0,p1 plain free release
                 told 1.3 110000 gave {count}\n"
            )
        };
        assert_eq!(of_p0(&gave(2)), (7, 2028));
        // Of which of them it gave back one is not said.
        assert_eq!(of_p0(&gave(1)), (7, 100));
        let last = "ask 1.4 500000 a p0 plain free release\n";
        assert_eq!(of_p0(&format!("{}{last}", gave(2))), (7, 500));
        // It may have been lost before, and be another hold now.
        let broken = format!("{entered}fault 40000 40000 break p0");
        assert_eq!(of_p0(&broken), (7, 30));
    }

    #[test]
    fn a_session_that_ends_takes_its_own_holds_along() {
        let of_part = OF_SESSION.replace("1.1", "1_2.1");
        assert_eq!(span(&format!("{of_part}closed 300000 1_2")), (20, 300));
        assert_eq!(span(&format!("{of_part}closed 300000 1_3")), (20, 1008));
        assert_eq!(span(&format!("{of_part}died 300000 1")), (20, 300));
        let in_time = "closed 300000 1_2
             ask 1_2.2 310000 a p0 plain session renew 60000
             told 1_2.2 320000 renewed 1";
        assert_eq!(span(&format!("{of_part}{in_time}")), (20, 310));
        let together = "fault 300000 400000 end-together";
        assert_eq!(span(&format!("{of_part}{together}")), (20, 1008));
    }

    #[test]
    fn a_guard_that_says_so_is_held_to_it_unless_it_cannot_know() {
        assert_eq!(span(&format!("{GRANT}sure 1500000 p0 a 7")), (20, 1500));
        let broken = "fault 1400000 1400000 break p0\nsure 1500000 p0 a 7";
        assert_eq!(span(&format!("{GRANT}{broken}")), (20, 1008));
        let stubborn = "fault 1400000 1400000 break p0\nsure 2600000 p0 a 7";
        assert_eq!(span(&format!("{GRANT}{stubborn}")), (20, 2600));
    }
}
