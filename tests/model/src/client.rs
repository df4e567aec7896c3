//! The client: its calls and its holds, and how each reply and event changes them.

use std::mem;

use crate::link::{Binding, Link, Pending};
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
    /// The node that its ACQUIRE went to.
    node: usize,
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
    /// The node where it was last confirmed, or where its RENEW went,
    node: usize,
    /// and the life of the session there in which it was confirmed.
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

    /// RENEW goes to another node. The session there may end before the answer is heard, so the
    /// session of the old node must not confirm the hold any more.
    fn go_to(&mut self, node: usize, setup: &Setup) {
        if setup.rules.moved_grace {
            (self.node, self.life) = (node, 0);
        }
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
    /// To each node.
    pub(crate) links: Vec<Link>,
    /// The node where the client believes the locks to be.
    pub(crate) home: usize,
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
            node: self.home,
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
        let link = &mut self.links[call.node];
        link.push(Command::Acquire, call.subject, call.number, false);
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
        let link = &mut self.links[call.node];
        link.push(Command::Cancel, subject.first(), number, true);
        for one in subject.each() {
            link.push(Command::Release { token: None }, one, number, true);
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
        self.links[held.node].push(command, held.subject, held.call, false);
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
        self.links[held.node].push(command, held.subject, held.call, false);
    }

    /// A lease counts from the last sending: a copy sent again starts it anew.
    pub(crate) fn note_sending(&mut self, node: usize, index: usize, setup: &Setup) {
        let request = &self.links[node].pending[index].request;
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
    pub(crate) fn hear(&mut self, node: usize, life: u8, events: Vec<Event>, setup: &Setup) {
        let link = &mut self.links[node];
        link.confirmed = link.asked_grace;
        if life != link.life {
            self.begin_life(node, life, setup);
        }
        let Link {
            confirmed,
            asked_lease,
            told_lease,
            ..
        } = self.links[node];
        for held in &mut self.holds {
            // A validity that has ended never begins again.
            if (held.node, held.life) == (node, life) && held.grace > 0 {
                held.grace = confirmed;
            }
        }
        let lease = if setup.rules.grant_since_before {
            told_lease
        } else {
            asked_lease
        };
        for event in events {
            if event.seq > self.links[node].seq {
                self.links[node].seq = event.seq;
                self.take_event(node, event, lease, setup);
            }
        }
        self.links[node].told_lease = asked_lease;
        self.go_on(node, setup);
    }

    /// In another life of the session each hold is renewed, and each wait asked for again.
    fn begin_life(&mut self, node: usize, life: u8, setup: &Setup) {
        let link = &mut self.links[node];
        (link.life, link.seq, link.told_lease) = (life, 0, 0);
        for held in self.holds.iter_mut().filter(|held| held.node == node) {
            if held.renewal == Renewal::None {
                held.renewal = Renewal::Needed; // one not answered yet is sent again anyway
            }
        }
        for index in 0..self.calls.len() {
            let call = &mut self.calls[index];
            if call.node != node {
                continue;
            }
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
    fn go_on(&mut self, node: usize, setup: &Setup) {
        for index in 0..self.calls.len() {
            let call = &self.calls[index];
            if call.node == node && call.phase == Phase::Refused {
                self.ask(index);
            }
        }
        for index in 0..self.holds.len() {
            let held = &self.holds[index];
            if held.node == node && held.must_renew(setup) {
                self.renew(index, setup);
            }
        }
    }

    /// `lease`: ticks left of a lease that began when it had not been granted yet.
    fn take_event(&mut self, node: usize, event: Event, lease: u8, setup: &Setup) {
        let subject = event.subject;
        let is_it = |held: &Held| {
            let is_told_here = held.node == node || !setup.rules.event_node;
            (held.subject, held.token) == (subject, event.token) && is_told_here
        };
        if let Some(index) = self.holds.iter().position(is_it) {
            return self.take_event_of_hold(index, event.kind, setup);
        }
        let mut calls = self.calls.iter();
        let Some(index) = calls.position(|call| call.subject.meets(subject)) else {
            return;
        };
        let call = &mut self.calls[index];
        if call.node != node && setup.rules.event_node {
            return;
        }
        match (event.kind, &call.phase) {
            // The reply may be under way: a hold can be lost before its client has heard of it.
            (Kind::Lost, Phase::Asked) if setup.rules.keep_losses => call.kept.push(event),
            (Kind::Lost, _) => {}
            (Kind::Moved, Phase::Asked) if event.token != 0 => call.kept.push(event),
            (Kind::Moved, _) if event.token != 0 => {}
            (_, Phase::Asked) if setup.rules.keep_events => call.kept.push(event),
            (_, Phase::Waiting { seq, life }) => {
                let is_its_own = *life == self.links[node].life && event.seq > *seq;
                if is_its_own || !setup.rules.compare_seq {
                    self.end_wait(index, event, lease, setup);
                }
            }
            _ => {}
        }
    }

    fn take_event_of_hold(&mut self, index: usize, kind: Kind, setup: &Setup) {
        let held = &mut self.holds[index];
        match (kind, held.guard) {
            (Kind::Lost, Guard::There) => held.guard = Guard::Lost,
            // A RENEW under way will be answered MOVED.
            (Kind::Moved, Guard::There) if held.renewal != Renewal::Asked => {
                held.go_to(self.links.len() - 1 - held.node, setup);
                held.renewal = Renewal::Needed;
                if held.must_renew(setup) {
                    self.renew(index, setup);
                }
            }
            _ => {} // the answer to RELEASE ends it
        }
    }

    fn end_wait(&mut self, index: usize, event: Event, lease: u8, setup: &Setup) {
        if event.call != self.calls[index].number {
            self.violation = Some("an event is taken for that of another wait");
        }
        match event.kind {
            Kind::Granted => {
                let lease = lease.max(self.calls[index].asked_lease);
                self.hold(index, event.token, lease, &[], setup);
            }
            Kind::Left => self.ask(index),
            Kind::Moved => self.ask_elsewhere(index),
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
        let link = &self.links[call.node];
        for one in call.subject.each() {
            self.holds.push(Held {
                call: call.number,
                subject: one,
                token,
                node: call.node,
                life: link.life,
                lease,
                grace: link.confirmed,
                guard: Guard::There,
                guards: 1,
                renewal: Renewal::None,
                asked_lease: 0,
            });
        }
        self.holds.sort_by_key(|held| held.subject);
        for event in kept.iter().filter(|event| event.token == token) {
            self.take_event(call.node, *event, 0, setup);
        }
    }

    // Replies on the command connection.

    /// The reply to the first command without an answer.
    pub(crate) fn hear_reply(&mut self, node: usize, reply: &Reply, setup: &Setup) {
        let pending = self.links[node].take_answered();
        let request = &pending.request;
        if *reply == Reply::Moved {
            return self.send_elsewhere(node, &pending, setup);
        }
        match request.command {
            Command::Acquire => self.hear_acquire(request.call, reply, setup),
            Command::Release { .. } => {
                self.holds
                    .retain(|held| held.guard != Guard::Gone || !held.is_of(request));
            }
            Command::Renew { .. } => self.hear_renew(node, request, reply, setup),
            Command::Cancel => {}
        }
        // An undo ends with its last answer: CANCEL may be answered after RELEASE, by another node.
        let links = &self.links;
        let is_sent = |call: &Call| links.iter().any(|link| link.has(call.number));
        self.calls
            .retain(|call| call.phase != Phase::Undoing || is_sent(call));
    }

    /// A command was answered MOVED, which names the other node. Only this answer sends it there: a
    /// copy under way could run later, if the slot comes back.
    fn send_elsewhere(&mut self, node: usize, pending: &Pending, setup: &Setup) {
        let Request {
            command,
            subject,
            call: number,
        } = pending.request;
        let other = self.links.len() - 1 - node;
        self.home = other;
        let is_it = |call: &Call| call.number == number && call.phase == Phase::Asked;
        match command {
            Command::Acquire => match self.calls.iter().position(is_it) {
                Some(index) => return self.ask_elsewhere(index),
                // CANCEL and RELEASE are on their way, and would not follow it.
                None if setup.rules.moved_undone => return,
                None => {}
            },
            Command::Renew { .. } => {
                let is_it = |held: &&mut Held| held.is_of(&pending.request);
                if let Some(held) = self.holds.iter_mut().find(is_it) {
                    held.go_to(other, setup);
                }
            }
            _ => {}
        }
        self.links[other].push(command, subject, number, pending.is_undo);
    }

    fn ask_elsewhere(&mut self, index: usize) {
        let call = &mut self.calls[index];
        call.node = self.links.len() - 1 - call.node;
        call.kept.clear(); // told by the other node
        self.home = call.node;
        self.ask(index);
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
                let node = self.calls[index].node;
                let life = if setup.rules.queued_life {
                    life
                } else {
                    self.links[node].life
                };
                self.calls[index].phase = Phase::Waiting { seq, life };
                for event in kept {
                    self.take_event(node, event, 0, setup); // in their order
                }
            }
            Reply::NoSession => self.calls[index].phase = Phase::Refused,
            // The call ends with an error.
            _ if setup.rules.undo_failed => self.undo(index, setup),
            _ => self.end(index, setup),
        }
    }

    fn hear_renew(&mut self, node: usize, request: &Request, reply: &Reply, setup: &Setup) {
        let is_it = |held: &&mut Held| held.is_of(request) && held.guard != Guard::Gone;
        let Some(held) = self.holds.iter_mut().find(is_it) else {
            return;
        };
        held.renewal = Renewal::None;
        match reply {
            Reply::Done(true) if held.says_held(setup) => {
                let link = &self.links[node];
                (held.lease, held.node) = (held.asked_lease, node);
                (held.life, held.grace) = (link.life, link.confirmed);
            }
            Reply::Done(true) => {} // too late: the guard has said that it is lost
            Reply::NoSession => held.renewal = Renewal::Needed,
            _ => held.guard = Guard::Lost,
        }
    }

    // Time and connections.

    /// Whether something goes on only after the next EVENTS reply of this node.
    pub(crate) fn needs_events(&self, node: usize, setup: &Setup) -> bool {
        let mut calls = self.calls.iter().filter(|call| call.node == node);
        let mut holds = self.holds.iter().filter(|held| held.node == node);
        self.links[node].binding == Binding::Closed
            || calls.any(|call| call.phase == Phase::Refused)
            || holds.any(|held| held.must_renew(setup))
    }

    pub(crate) fn tick(&mut self) {
        self.links.iter_mut().for_each(Link::tick);
        let calls = self.calls.iter_mut().map(|call| &mut call.asked_lease);
        let holds = self.holds.iter_mut();
        let holds =
            holds.flat_map(|held| [&mut held.lease, &mut held.grace, &mut held.asked_lease]);
        calls
            .chain(holds)
            .for_each(|ticks| *ticks = ticks.saturating_sub(1));
    }

    /// The command connection is replaced: all without an answer is sent again, in order.
    pub(crate) fn send_again(&mut self, node: usize, setup: &Setup) {
        self.links[node].sent = 0;
        if !setup.rules.undo_until_answered {
            self.links[node].pending.retain(|pending| !pending.is_undo);
            self.calls.retain(|call| call.phase != Phase::Undoing);
        }
    }
}
