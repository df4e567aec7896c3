//! What time brings: when the next thing is due, and what is over.

use crate::interface::effect::Effect;
use crate::memory::log::metrics::count;
use crate::memory::state::Locks;
use crate::turn::turn::DECISIONS_MAX;
use crate::values::time::{Now, earlier};

impl Locks {
    /// Whether nothing is known of any lock or session, and nothing is left to do.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.table.is_quiet()
            && self.sessions.len() == 0
            && self.agenda.is_quiet()
            && self.log_lines.are_whole()
            && self.grant_delay.is_over()
    }

    /// Whether anything depends on the monotonic clock now: a wait, a pending release, a session
    /// whose grace or call of EVENTS ends, the grant delay, or work and log lines that are still
    /// due. If nothing does, a command's decision needs the wall clock alone.
    #[inline]
    pub fn is_timed(&self) -> bool {
        !self.is_quiet() && self.has_timed()
    }

    fn has_timed(&self) -> bool {
        self.table.any_queue()
            || self.table.any_pending()
            || self.sessions.next_deadline().is_some()
            || !self.agenda.is_quiet()
            || !self.log_lines.are_whole()
            || !self.grant_delay.is_over()
    }

    /// Milliseconds until something is due; none if nothing ever is.
    #[inline]
    pub fn next_deadline(&self, now: Now) -> Option<i64> {
        // The common case.
        if self.is_quiet() {
            return None;
        }
        self.nearest_deadline(now)
    }

    fn nearest_deadline(&self, now: Now) -> Option<i64> {
        let is_marked = !self.agenda.is_empty() || self.holds.any_dirty();
        if is_marked || self.sessions.any_overflowing() {
            return Some(0);
        }
        let mono = earlier(self.sessions.next_deadline(), self.agenda.next_sweep());
        let mono = earlier(mono, self.log_lines.deadline());
        let mono = mono.map(|at| at.saturating_sub(now.mono_ms));
        let check = self.holds.checks.next();
        let check = check.map(|at| at.saturating_sub(now.wall_ms()));
        let delay = self.grant_delay.deadline(now);
        let delay = delay.filter(|_| self.table.any_queue());
        let left = earlier(earlier(mono, check), delay);
        earlier(left.map(|left| left.max(0)), self.table.next_deadline(now))
    }

    /// Time has passed: marks the queues and holds to look at, and ends sessions, calls of EVENTS
    /// and the grant delay when they are over. Takes no more of each kind than a turn may decide:
    /// the rest stays due, and the timer fires again at once.
    pub fn passed(&mut self, now: Now, effects: &mut Vec<Effect>) {
        for _ in 0..DECISIONS_MAX {
            let Some(queue) = self.table.take_lease_over(now) else {
                break;
            };
            self.mark_queue(queue);
        }
        self.end_grant_delay(now);
        self.say_left_out(now, effects);
        self.holds.mark_due(DECISIONS_MAX, now);
        for _ in 0..DECISIONS_MAX {
            let Some(session) = self.sessions.listen_ends.due(now.mono_ms) else {
                break;
            };
            effects.extend(self.sessions.stop_listening(session).map(Effect::Wake));
        }
        self.end_sessions(now, effects);
    }

    /// Ends sessions whose grace is over. Of those that left too many events unacknowledged it
    /// drops the events, as if their connections had closed. Stops when they have as many holds,
    /// waiters and events as a turn may decide.
    fn end_sessions(&mut self, now: Now, effects: &mut Vec<Effect>) {
        let mut ended = 0_usize;
        while ended < DECISIONS_MAX {
            let Some(session) = self.sessions.next_overflowing() else {
                break;
            };
            count(&mut self.counters.sessions_overflowed);
            ended = ended.saturating_add(self.sessions.size_of(session));
            self.sessions.end_life(session);
            self.detach(session, now, effects);
        }
        while ended < DECISIONS_MAX {
            let Some(session) = self.sessions.grace_ends.due(now.mono_ms) else {
                break;
            };
            ended = ended.saturating_add(self.sessions.size_of(session));
            let name = self.sessions.name_of(session).cloned();
            let holds = self.sessions.end(session);
            self.log_session_ended(name, &holds, now);
            self.end_holds_later(holds);
        }
    }
}
