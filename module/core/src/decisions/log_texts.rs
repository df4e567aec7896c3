//! The texts of the log about holds that were lost, broken or long.

use crate::decisions::decision::Decision;
use crate::interface::event::LostReason;
use crate::interface::stored::HeldBy;
use crate::memory::hold::SessionHold;
use crate::memory::log::event_log::LogEvent;
use crate::values::mode::Mode;
use crate::values::time::held_ms;
use crate::values::token::Token;
use crate::values::word::Word;
use std::fmt::Write as _;
use std::rc::Rc;

impl Decision<'_> {
    /// Logs that a session has lost this hold. A broken hold is in the log already.
    pub(crate) fn log_lost(&mut self, hold: &SessionHold, reason: LostReason) {
        let why = match reason {
            LostReason::Expired => "its lease was over",
            LostReason::Deleted => "its key was deleted, or written by somebody else",
            LostReason::Broken | LostReason::Released | LostReason::Taken => return,
        };
        if !self.locks.log.is_on() {
            return;
        }
        let held_ms = hold.since_us.map(|since_us| held_ms(since_us, self.now));
        let mut text = why.to_owned();
        describe_hold(
            &mut text,
            held_ms,
            self.locks.sessions.name_of(hold.session),
        );
        self.log(LogEvent::Lost, Some(&hold.owner), hold.token, text);
    }

    /// Logs that BREAK is about to end these holds: this many of readers or of permits. `first` is
    /// one hold, a writer's before others.
    pub(crate) fn log_broken(&mut self, held_as: Mode, holders: usize, first: Option<&HeldBy>) {
        if !self.locks.log.is_on() {
            return;
        }
        let only = first.filter(|_| held_as == Mode::Write || holders == 1);
        let (owner, token) = (
            only.map(|held_by| &*held_by.owner),
            only.and_then(|held_by| held_by.token),
        );
        let mut text = match held_as {
            Mode::Plain => "the hold was broken".to_owned(),
            Mode::Write => "the writer's hold was broken".to_owned(),
            Mode::Read => format!("the holds of {holders} readers were broken"),
            Mode::Permits => format!("the permits of {holders} owners were broken"),
        };
        if let Some(owner) = owner {
            let view = self
                .locks
                .hold_view(self.at, owner, held_as, token, self.now);
            describe_hold(&mut text, view.held_ms, view.session.as_ref());
        }
        self.log(LogEvent::Broken, owner, token, text);
    }

    /// Logs a hold that ends, if it was long.
    pub(crate) fn log_long_hold(&mut self, owner: &[u8], mode: Mode, token: Option<Token>) {
        let limit = self.locks.log.options.holds_ms;
        let since_us = token.and_then(|token| self.locks.tokens.granted_at(token));
        if since_us.is_some_and(|since_us| held_ms(since_us, self.now) < limit) {
            return;
        }
        let view = self.locks.hold_view(self.at, owner, mode, token, self.now);
        if view.held_ms.is_none_or(|held_ms| held_ms < limit) {
            return;
        }
        let mut text = "given back".to_owned();
        describe_hold(&mut text, view.held_ms, view.session.as_ref());
        self.log(LogEvent::LongHold, Some(owner), token, text);
    }

    /// Logs an event at this lock.
    fn log(&mut self, event: LogEvent, owner: Option<&[u8]>, token: Option<Token>, text: String) {
        let log = &mut self.locks.log;
        log.add(event, self.at, owner, token, text, self.now);
    }
}

fn describe_hold(text: &mut String, held_ms: Option<i64>, session: Option<&Rc<[u8]>>) {
    if let Some(held_ms) = held_ms {
        let _ = write!(text, ", after {held_ms} ms");
    }
    if let Some(session) = session {
        let _ = write!(text, ", session '{}'", Word::new(session));
    }
}
