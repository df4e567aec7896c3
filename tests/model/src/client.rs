//! The client: its calls and its holds, and what it does with each reply and event.

use std::mem;

use crate::link::{Binding, Link};
use crate::message::{Command, Event, Kind, Reply, Request, Subject};
use crate::setup::Setup;

/// How far a call of `lock()` has come.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Phase {
    /// ACQUIRE is not answered yet.
    Asked,
    /// It was answered NOSESSION, and is sent again after the next EVENTS reply.
    Refused,
    /// The wait is in the server's queue: a later event than `seq` of this life ends it.
    Waiting { seq: u8, life: u8 },
    /// The future was dropped: CANCEL and RELEASE are not answered yet.
    Undoing,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) number: u8,
    /// The locks that the server is asked for.
    pub(crate) subject: Subject,
    /// Holds of the owner that the call enters again.
    entered: Vec<Subject>,
    pub(crate) phase: Phase,
    /// Ticks left of a lease that began when ACQUIRE was last sent.
    asked_lease: u8,
    /// Events heard before the reply to ACQUIRE.
    kept: Vec<Event>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Guard {
    There,
    /// The server has said that the hold has ended.
    Lost,
    /// RELEASE is not answered yet: no guard is left.
    Gone,
}

/// RENEW with SESSION tells the server to which session a hold belongs, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Renewal {
    None,
    Needed,
    /// RENEW is not answered yet.
    Asked,
}

/// A hold, and its guards.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Held {
    pub(crate) call: u8,
    pub(crate) subject: Subject,
    pub(crate) token: u8,
    /// The life of the session in which the hold was last confirmed.
    pub(crate) life: u8,
    /// Ticks for which the guard may count on the lease,
    lease: u8,
    /// and on the session.
    grace: u8,
    pub(crate) guard: Guard,
    /// Re-entry is counted here: the server has one hold, with count 1.
    guards: u8,
    pub(crate) renewal: Renewal,
    /// Ticks left of a lease that began when RENEW was last sent.
    asked_lease: u8,
}

impl Held {
    /// The guard's answer to `is_lost()`, turned round.
    pub(crate) fn says_held(&self, setup: &Setup) -> bool {
        let in_session = self.grace > 0 || setup.size.grace == 0;
        self.guard == Guard::There && self.lease > 0 && in_session
    }

    /// Whether this command was sent for it.
    fn is_of(&self, request: &Request) -> bool {
        (self.call, self.subject) == (request.call, request.subject)
    }

    fn must_renew(&self, setup: &Setup) -> bool {
        self.renewal == Renewal::Needed && self.says_held(setup)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Client {
    pub(crate) link: Link,
    pub(crate) calls: Vec<Call>,
    pub(crate) holds: Vec<Held>,
    /// For the checks.
    pub(crate) violation: Option<&'static str>,
}

impl Client {
    // Steps of the program.

    /// Whether a call has to wait for an earlier one of its own owner, for the same lock and mode.
    /// It need not if it can enter a hold of its owner again.
    pub(crate) fn is_busy(&self, subject: Subject, setup: &Setup) -> bool {
        let may_enter = |held: &Held| setup.size.reentry == 1 && held.says_held(setup);
        let mut holds = self.holds.iter();
        self.calls.iter().any(|call| call.subject.meets(subject))
            || holds.any(|held| held.subject.meets(subject) && !may_enter(held))
    }

    /// Locks that the owner holds are entered again here, without the server: another guard of the
    /// same hold. The server is asked for the others.
    pub(crate) fn lock(&mut self, subject: Subject, number: u8, setup: &Setup) {
        let held = self
            .holds
            .iter_mut()
            .filter(|held| held.subject.meets(subject));
        let mut entered = vec![];
        for held in held {
            entered.push(held.subject);
            held.guards += u8::from(setup.rules.count_at_once);
        }
        let Some(subject) = subject.without(&entered) else {
            return self.enter(&entered, setup);
        };
        self.calls.push(Call {
            number,
            subject,
            entered,
            phase: Phase::Asked,
            asked_lease: 0,
            kept: vec![],
        });
        self.ask(self.calls.len() - 1);
    }

    /// A call ends with guards of these holds, too.
    fn enter(&mut self, entered: &[Subject], setup: &Setup) {
        for subject in entered {
            let is_it = |held: &&mut Held| held.subject == *subject && held.guard != Guard::Gone;
            match self.holds.iter_mut().find(is_it) {
                Some(held) => held.guards += u8::from(!setup.rules.count_at_once),
                None => self.violation = Some("a call for several locks ends without one of them"),
            }
        }
    }

    /// A call ends without guards of these holds.
    fn leave(&mut self, entered: &[Subject], setup: &Setup) {
        for subject in entered.iter().filter(|_| setup.rules.count_at_once) {
            let is_it = |held: &Held| held.subject == *subject;
            if let Some(index) = self.holds.iter().position(is_it) {
                self.unlock(index, setup);
            }
        }
    }

    /// Guards of this hold that the program has, and no call that is not told yet.
    pub(crate) fn guards(&self, held: &Held, setup: &Setup) -> u8 {
        let calls = self
            .calls
            .iter()
            .filter(|call| call.entered.contains(&held.subject));
        let counted = if setup.rules.count_at_once {
            calls.count()
        } else {
            0
        };
        held.guards - u8::try_from(counted).expect("few")
    }

    fn ask(&mut self, index: usize) {
        let call = &mut self.calls[index];
        call.phase = Phase::Asked;
        self.link
            .push(Command::Acquire, call.subject, call.number, false);
    }

    /// The future is dropped, or its time is up.
    pub(crate) fn drop_call(&mut self, index: usize, setup: &Setup) {
        if self.calls[index].phase == Phase::Refused && !setup.rules.undo_refused {
            self.end(index, setup);
        } else {
            self.undo(index, setup);
        }
    }

    /// Takes back what a copy of the call's ACQUIRE may have got. In order on one connection, and
    /// without a token, since none is known.
    fn undo(&mut self, index: usize, setup: &Setup) {
        let call = &mut self.calls[index];
        let (subject, number) = (call.subject, call.number);
        (call.phase, call.asked_lease) = (Phase::Undoing, 0);
        call.kept.clear();
        let entered = mem::take(&mut call.entered);
        self.link
            .push(Command::Cancel, subject.first(), number, true);
        for one in subject.each() {
            self.link
                .push(Command::Release { token: None }, one, number, true);
        }
        if !setup.rules.gate {
            self.calls.remove(index);
        }
        self.leave(&entered, setup);
    }

    /// The call ends without a guard.
    fn end(&mut self, index: usize, setup: &Setup) {
        let call = self.calls.remove(index);
        self.leave(&call.entered, setup);
    }

    /// A guard is unlocked or dropped, whether it says held or not. The last one releases.
    pub(crate) fn unlock(&mut self, index: usize, setup: &Setup) {
        let held = &mut self.holds[index];
        held.guards -= 1;
        let is_last = held.guards == 0;
        if !is_last && setup.rules.count_guards {
            return;
        }
        if held.guard == Guard::Lost {
            self.holds.remove(index); // the server said so: there is nothing to release
            return;
        }
        let token = setup.rules.token.then_some(held.token);
        let command = Command::Release { token };
        self.link.push(command, held.subject, held.call, false);
        if is_last {
            held.guard = Guard::Gone;
            if !setup.rules.gate {
                self.holds.remove(index);
            }
        }
    }

    pub(crate) fn renew(&mut self, index: usize, setup: &Setup) {
        let held = &mut self.holds[index];
        held.renewal = Renewal::Asked;
        let token = setup.rules.token.then_some(held.token);
        let command = Command::Renew { token };
        self.link.push(command, held.subject, held.call, false);
    }

    /// A lease counts from the last sending: a copy sent again starts it anew.
    pub(crate) fn note_sending(&mut self, index: usize, setup: &Setup) {
        let request = &self.link.pending[index].request;
        match request.command {
            Command::Acquire => {
                let mut calls = self.calls.iter_mut();
                if let Some(call) = calls.find(|call| call.number == request.call) {
                    call.asked_lease = setup.size.lease;
                }
            }
            Command::Renew { .. } => {
                let is_it = |held: &&mut Held| held.is_of(request);
                if let Some(held) = self.holds.iter_mut().find(is_it) {
                    held.asked_lease = setup.size.lease;
                }
            }
            _ => {}
        }
    }

    // Replies on the session connection.

    /// A reply to EVENTS.
    pub(crate) fn hear(&mut self, life: u8, events: Vec<Event>, setup: &Setup) {
        self.link.confirmed = self.link.asked_grace;
        if life != self.link.life {
            self.begin_life(life, setup);
        }
        for held in &mut self.holds {
            // A validity that has ended never begins again.
            if held.life == life && held.grace > 0 {
                held.grace = self.link.confirmed;
            }
        }
        for event in events {
            if event.seq > self.link.seq {
                self.link.seq = event.seq;
                let lease = if setup.rules.grant_since_before {
                    self.link.told_lease
                } else {
                    self.link.asked_lease
                };
                self.take_event(event, lease, setup);
            }
        }
        self.link.told_lease = self.link.asked_lease;
        self.go_on(setup);
    }

    /// In another life of the session each hold is renewed, and each wait asked for again.
    fn begin_life(&mut self, life: u8, setup: &Setup) {
        (self.link.life, self.link.seq, self.link.told_lease) = (life, 0, 0);
        for held in &mut self.holds {
            if held.renewal == Renewal::None {
                held.renewal = Renewal::Needed; // one not answered yet is sent again anyway
            }
        }
        for index in 0..self.calls.len() {
            let call = &mut self.calls[index];
            call.kept.clear(); // of an earlier life
            match call.phase {
                // The reply to its ACQUIRE has told of this life before EVENTS did.
                Phase::Waiting { life: of_wait, .. }
                    if of_wait == life && setup.rules.queued_life => {}
                Phase::Waiting { .. } => self.ask(index),
                _ => {}
            }
        }
    }

    /// After an EVENTS reply: somebody listens to the session.
    fn go_on(&mut self, setup: &Setup) {
        for index in 0..self.calls.len() {
            if self.calls[index].phase == Phase::Refused {
                self.ask(index);
            }
        }
        for index in 0..self.holds.len() {
            if self.holds[index].must_renew(setup) {
                self.renew(index, setup);
            }
        }
    }

    /// `lease`: ticks left of a lease that began when it had not been granted yet.
    fn take_event(&mut self, event: Event, lease: u8, setup: &Setup) {
        let subject = event.subject;
        if event.kind == Kind::Lost {
            let mut holds = self.holds.iter_mut();
            let is_it = |held: &&mut Held| held.subject == subject && held.token == event.token;
            if let Some(held) = holds.find(is_it) {
                if held.guard == Guard::There {
                    held.guard = Guard::Lost; // else the answer to RELEASE ends it
                }
                return;
            }
        }
        let mut calls = self.calls.iter();
        let Some(index) = calls.position(|call| call.subject.meets(subject)) else {
            return;
        };
        let call = &mut self.calls[index];
        match (event.kind, &call.phase) {
            // The reply may be under way: a hold can be lost before its client has heard of it.
            (Kind::Lost, Phase::Asked) if setup.rules.keep_losses => call.kept.push(event),
            (Kind::Lost, _) => {}
            (_, Phase::Asked) if setup.rules.keep_events => call.kept.push(event),
            (_, Phase::Waiting { seq, life }) => {
                let is_its_own = *life == self.link.life && event.seq > *seq;
                if is_its_own || !setup.rules.compare_seq {
                    self.end_wait(index, &event, lease, setup);
                }
            }
            _ => {}
        }
    }

    fn end_wait(&mut self, index: usize, event: &Event, lease: u8, setup: &Setup) {
        if event.call != self.calls[index].number {
            self.violation = Some("an event is taken for that of another wait");
        }
        match event.kind {
            Kind::Granted => {
                let lease = lease.max(self.calls[index].asked_lease);
                self.hold(index, event.token, lease, &[], setup);
            }
            Kind::Left => self.ask(index),
            // The call ends: not acquired.
            Kind::Timeout if self.calls[index].subject.is_joint() && setup.rules.undo_timed_out => {
                self.undo(index, setup);
            }
            Kind::Timeout | Kind::Lost => self.end(index, setup),
        }
    }

    /// The call ends with a guard for each name. `kept`: events about it that were heard before.
    fn hold(&mut self, index: usize, token: u8, lease: u8, kept: &[Event], setup: &Setup) {
        let call = self.calls.remove(index);
        self.enter(&call.entered, setup);
        for one in call.subject.each() {
            let is_its = |event: &Event| (event.subject, event.token) == (one, token);
            let is_lost = kept
                .iter()
                .any(|event| event.kind == Kind::Lost && is_its(event));
            self.holds.push(Held {
                call: call.number,
                subject: one,
                token,
                life: self.link.life,
                lease,
                grace: self.link.confirmed,
                guard: if is_lost { Guard::Lost } else { Guard::There },
                guards: 1,
                renewal: Renewal::None,
                asked_lease: 0,
            });
        }
        self.holds.sort_by_key(|held| held.subject);
    }

    // Replies on the command connection.

    /// The reply to the first command without an answer.
    pub(crate) fn hear_reply(&mut self, reply: &Reply, setup: &Setup) {
        let request = self.link.take_answered().request;
        match request.command {
            Command::Acquire => self.hear_acquire(request.call, reply, setup),
            Command::Release { .. } => {
                self.holds
                    .retain(|held| held.guard != Guard::Gone || !held.is_of(&request));
                let link = &self.link;
                self.calls
                    .retain(|call| call.phase != Phase::Undoing || link.has(call.number));
            }
            Command::Renew { .. } => self.hear_renew(&request, reply, setup),
            Command::Cancel => {}
        }
    }

    fn hear_acquire(&mut self, number: u8, reply: &Reply, setup: &Setup) {
        let is_it = |call: &Call| call.number == number && call.phase == Phase::Asked;
        let Some(index) = self.calls.iter().position(is_it) else {
            return; // it is being undone
        };
        let kept = mem::take(&mut self.calls[index].kept);
        match *reply {
            Reply::Held { token } => {
                let lease = self.calls[index].asked_lease;
                self.hold(index, token, lease, &kept, setup);
            }
            Reply::Queued { seq, life } => {
                let life = if setup.rules.queued_life {
                    life
                } else {
                    self.link.life
                };
                self.calls[index].phase = Phase::Waiting { seq, life };
                for event in kept {
                    self.take_event(event, 0, setup); // in their order
                }
            }
            Reply::NoSession => self.calls[index].phase = Phase::Refused,
            // The call ends with an error.
            _ if setup.rules.undo_failed => self.undo(index, setup),
            _ => self.end(index, setup),
        }
    }

    fn hear_renew(&mut self, request: &Request, reply: &Reply, setup: &Setup) {
        let is_it = |held: &&mut Held| held.is_of(request) && held.guard != Guard::Gone;
        let Some(held) = self.holds.iter_mut().find(is_it) else {
            return;
        };
        held.renewal = Renewal::None;
        match reply {
            Reply::Done(true) if held.says_held(setup) => {
                (held.lease, held.life) = (held.asked_lease, self.link.life);
                held.grace = self.link.confirmed;
            }
            Reply::Done(true) => {} // too late: the guard has said that it is lost
            Reply::NoSession => held.renewal = Renewal::Needed,
            _ => held.guard = Guard::Lost,
        }
    }

    // Time and connections.

    /// Whether something goes on only after the next EVENTS reply.
    pub(crate) fn needs_events(&self, setup: &Setup) -> bool {
        self.link.binding == Binding::Closed
            || self.calls.iter().any(|call| call.phase == Phase::Refused)
            || self.holds.iter().any(|held| held.must_renew(setup))
    }

    pub(crate) fn tick(&mut self) {
        self.link.tick();
        let calls = self.calls.iter_mut().map(|call| &mut call.asked_lease);
        let holds = self.holds.iter_mut();
        let holds =
            holds.flat_map(|held| [&mut held.lease, &mut held.grace, &mut held.asked_lease]);
        calls
            .chain(holds)
            .for_each(|ticks| *ticks = ticks.saturating_sub(1));
    }

    /// The command connection is replaced: all without an answer is sent again, in order.
    pub(crate) fn send_again(&mut self, setup: &Setup) {
        self.link.sent = 0;
        if !setup.rules.undo_until_answered {
            self.link.pending.retain(|pending| !pending.is_undo);
            self.calls.retain(|call| call.phase != Phase::Undoing);
        }
    }
}
