//! Short runs that are about one kind of race each. The other draws of [`Schedule::of`] have a bit
//! of everything, and come to some of these races too seldom.

use std::time::Duration;

use crate::schedule::{
    Client, Draw, End, Fault, FaultKind, LOCKS, Mode, Owning, Schedule, Step, Task, Verb,
};

/// The parts that a theme decides; all else is the same for all.
struct Plan {
    latency: Duration,
    clients: Vec<Client>,
    tasks: Vec<Task>,
    faults: Vec<Fault>,
    is_busy: bool,
}

/// The first of the read-write locks.
const READ_WRITE: u8 = LOCKS;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn client(grace_ms: u64, lease_ms: u64) -> Client {
    Client {
        grace: ms(grace_ms),
        lease: ms(lease_ms),
        response_timeout: ms(2_000),
        acknowledged: None,
        copies: 1,
    }
}

/// Takes these, waiting for them, and holds them for this time.
fn step(mode: Mode, locks: &[u8], hold_ms: u64) -> Step {
    Step {
        locks: locks.to_vec(),
        mode,
        asked: None,
        verb: Verb::Lock,
        lease: None,
        drop_after: None,
        drop_when_woken: None,
        stop: None,
        ahead: None,
        kept: None,
        hold: ms(hold_ms),
        inside: Vec::new(),
        renews: false,
        downgrades: false,
        calls: 0,
        listens: None,
        end: End::Unlock,
    }
}

fn task(client: usize, at_ms: u64, owner: Owning, steps: Vec<Step>) -> Task {
    Task {
        client,
        at: ms(at_ms),
        owner,
        steps,
    }
}

fn fault(at_ms: u64, kind: FaultKind) -> Fault {
    Fault {
        at: ms(at_ms),
        kind,
        server: 0,
        step: None,
    }
}

impl Draw {
    /// A run about one kind of race.
    pub(crate) fn theme(&mut self) -> Schedule {
        let plan = match self.0.u8(0..13) {
            0 => self.taken_again(),
            1 => self.stalls(),
            2 => self.attached_anew(),
            3 => self.called_back(),
            4 => self.refused_beside_a_guard(),
            5 => self.granted_unheard(),
            6 => self.released_late(),
            7 => self.taken_beside_what_is_unheard(),
            8 => self.queued(),
            9 => self.out_of_touch(),
            10 => self.given_up(),
            _ => self.sessions_end(),
        };
        let mut faults = plan.faults;
        faults.sort_by_key(|fault| fault.at);
        Schedule {
            seed: self.0.u64(..),
            latency: plan.latency,
            servers: 1,
            watched: None,
            clustered: None,
            grant_delay: Duration::ZERO,
            clients: plan.clients,
            tasks: plan.tasks,
            limits: Vec::new(),
            faults,
            is_busy: plan.is_busy,
            small: None,
        }
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        self.0.u64(least..=most)
    }

    pub(crate) fn end(&mut self) -> End {
        let ends = [End::Unlock, End::UnlockUnheard, End::Drop];
        self.pick(&ends).unwrap_or(End::Drop)
    }

    /// Leases end about when their locks are given back, and their owners ask for the same again:
    /// word of a loss, releases and new grants cross each other.
    fn taken_again(&mut self) -> Plan {
        let lease = self.pick(&[200, 500, 1_000, 2_000, 2_000]).unwrap_or(200);
        let (mode, lock) = match self.0.u8(0..3) {
            0 | 1 => (Mode::Plain, 0),
            _ => (Mode::Write, READ_WRITE),
        };
        let owner = self.pick(&[Owning::Task, Owning::Shared, Owning::Call]);
        let owner = owner.unwrap_or(Owning::Task);
        let is_patient = self.one_in(2);
        let clients = usize::from(self.up_to(1, 2));
        let tasks = (0..self.up_to(1, 5)).map(|number| {
            let steps = (0..self.up_to(2, 4)).map(|_| {
                let is_short = self.one_in(5);
                let most = if is_short { 50 } else { lease + 60 };
                let fewest = if is_short { 0 } else { lease - 60 };
                let verb = match self.0.u8(0..4) {
                    _ if is_patient => Verb::Lock,
                    0 => Verb::Try,
                    1 => Verb::Within(ms(2_000)),
                    _ => Verb::Lock,
                };
                Step {
                    verb,
                    lease: Some(ms(lease)),
                    end: self.end(),
                    ..step(mode, &[lock], self.between(fewest, most))
                }
            });
            let steps = steps.collect();
            let at = self.between(0, lease);
            task(usize::from(number) % clients, at, owner, steps)
        });
        Plan {
            tasks: tasks.collect(),
            latency: self.ms(&[10, 50, 100]),
            clients: vec![client(5_000, 30_000); clients],
            faults: Vec::new(),
            is_busy: self.one_in(4),
        }
    }

    /// Many wait for one lock. Each lease ends while others wait, and its owner asks again in that
    /// moment, when the server may not have noticed yet.
    fn queued(&mut self) -> Plan {
        let lease = self.pick(&[200, 500]).unwrap_or(200);
        let tasks = (0..self.up_to(3, 6)).map(|_| {
            let steps = (0..self.up_to(3, 4)).map(|_| Step {
                lease: Some(ms(lease)),
                end: self.end(),
                ..step(Mode::Plain, &[0], self.between(lease - 5, lease + 20))
            });
            let steps = steps.collect();
            task(0, self.between(0, 2 * lease), Owning::Call, steps)
        });
        Plan {
            tasks: tasks.collect(),
            latency: self.ms(&[0, 1, 2, 10]),
            clients: vec![client(5_000, 30_000)],
            faults: Vec::new(),
            is_busy: true,
        }
    }

    /// A client's connections end, and it gets no others for longer than its grace, while others
    /// wait for its locks.
    fn out_of_touch(&mut self) -> Plan {
        let grace = self.pick(&[500, 1_000]).unwrap_or(500);
        let (mode, lock) = match self.0.u8(0..3) {
            0 => (Mode::Write, READ_WRITE),
            _ => (Mode::Plain, 0),
        };
        let mut tasks = Vec::new();
        for number in 0..self.up_to(2, 4) {
            let steps = (0..self.up_to(1, 3)).map(|_| {
                let hold = self.between(100, 4_000);
                step(mode, &[lock], hold)
            });
            let steps = steps.collect();
            let (client, at) = (usize::from(number % 2), self.between(0, 300));
            tasks.push(task(client, at, Owning::Call, steps));
        }
        let (to_server, at) = (!self.one_in(3), self.between(200, 2_000));
        let cut = FaultKind::Cut {
            client: 0,
            to_server,
            to_host: !to_server || self.one_in(2),
            lasts: ms(self.between(grace / 2, 5 * grace)),
        };
        Plan {
            tasks,
            latency: self.ms(&[0, 1, 10]),
            clients: vec![client(grace, 30_000), client(5_000, 30_000)],
            faults: vec![fault(at, cut), fault(at + 1, FaultKind::Reset(0))],
            is_busy: self.one_in(4),
        }
    }

    /// A writer gives back when its lease is about to end, and has just asked for the same again:
    /// the lease may end before either arrives, and the release names no token.
    fn released_late(&mut self) -> Plan {
        let latency = self.pick(&[10, 50, 100]).unwrap_or(10);
        let first = step(Mode::Read, &[READ_WRITE + 1], 0);
        let mut tasks = vec![task(0, 0, Owning::Call, vec![first])];
        let mut at = 1_000;
        for _ in 0..self.up_to(1, 4) {
            let lease = self.pick(&[200, 500]).unwrap_or(200);
            let write = |hold, end| Step {
                lease: Some(ms(lease)),
                end,
                ..step(Mode::Write, &[READ_WRITE], hold)
            };
            let hold = lease - self.between(5, 2 * latency.min(lease / 3) + 5);
            let (end, again) = (self.end(), self.end());
            let later = at + lease - self.between(0, latency.min(lease / 2));
            tasks.push(task(0, at, Owning::Shared, vec![write(hold, end)]));
            tasks.push(task(0, later, Owning::Shared, vec![write(100, again)]));
            at += 1_500;
        }
        Plan {
            tasks,
            latency: ms(latency),
            clients: vec![client(5_000, 30_000)],
            faults: Vec::new(),
            is_busy: self.one_in(4),
        }
    }

    /// A writer gives back on a connection that is held up until it is given up, and its owner asks
    /// for the same lock by the next connection: the release arrives when it holds the lock again.
    fn given_up(&mut self) -> Plan {
        let mut tasks = Vec::new();
        let mut faults = Vec::new();
        let mut at = self.between(100, 500);
        for _ in 0..self.up_to(1, 3) {
            let hold = self.between(100, 300);
            let write = |hold, end| Step {
                end,
                ..step(Mode::Write, &[READ_WRITE], hold)
            };
            let (end, again) = (self.end(), self.end());
            let steps = vec![write(hold, end), write(self.between(1_000, 3_000), again)];
            tasks.push(task(0, at, Owning::Task, steps));
            let held_up = FaultKind::CutOne {
                client: 0,
                connection: self.0.usize(0..2),
                to_server: true,
                to_host: self.one_in(2),
                lasts: ms(self.between(600, 2_500)),
                arrives: true,
            };
            faults.push(fault(at + hold - self.between(0, 90), held_up));
            at += 5_000;
        }
        let quick = Client {
            response_timeout: ms(500),
            ..client(5_000, 30_000)
        };
        Plan {
            tasks,
            faults,
            latency: self.ms(&[0, 1, 10]),
            clients: vec![quick],
            is_busy: self.one_in(4),
        }
    }

    /// Long holds, and calls and answers that are late again and again, such that session
    /// connections are opened anew and nothing else happens: see [`Schedule::is_plain`].
    fn stalls(&mut self) -> Plan {
        let tasks = (0..self.up_to(1, 2)).map(|number| {
            let steps = vec![step(Mode::Plain, &[number], self.between(25_000, 45_000))];
            task(0, self.between(0, 1_000), Owning::Call, steps)
        });
        let tasks = tasks.collect();
        let mut at = 2_000;
        let faults = (0..4).map(|_| {
            at += self.between(3_000, 7_000);
            let to_server = self.one_in(2);
            let late = FaultKind::CutOne {
                client: 0,
                connection: self.0.usize(0..2),
                to_server,
                to_host: !to_server,
                lasts: ms(self.between(1_300, 1_750)),
                arrives: true,
            };
            fault(at, late)
        });
        Plan {
            faults: faults.collect(),
            tasks,
            latency: self.ms(&[0, 1, 10]),
            clients: vec![client(5_000, 30_000)],
            is_busy: false,
        }
    }

    /// Session connections end while answers to calls are late, and are there again before these.
    fn attached_anew(&mut self) -> Plan {
        let clients = self.up_to(1, 2);
        let tasks = (0..self.up_to(2, 5)).map(|number| {
            let steps = (0..self.up_to(3, 4)).map(|_| {
                let lock = self.0.u8(0..LOCKS);
                Step {
                    end: self.end(),
                    ..step(Mode::Plain, &[lock], self.between(0, 300))
                }
            });
            let steps = steps.collect();
            let at = self.between(0, 500);
            task((number % clients).into(), at, Owning::Call, steps)
        });
        let tasks = tasks.collect();
        let mut faults = Vec::new();
        let mut at = self.between(100, 1_500);
        let client = self.0.usize(0..clients.into());
        // Twice: a request that is sent when the first answer has come is late as well.
        for is_first in [true, false] {
            let lasts = self.between(200, 700);
            // The connection that was opened anew is the last of the two.
            let late = if is_first { self.0.usize(0..2) } else { 0 };
            let cut = FaultKind::CutOne {
                client,
                connection: late,
                to_server: false,
                to_host: true,
                lasts: ms(lasts),
                arrives: true,
            };
            let connection = 1 - late;
            let reset = FaultKind::ResetOne { client, connection };
            faults.extend([fault(at, cut), fault(at + self.between(0, 150), reset)]);
            at += lasts + self.between(0, 60);
        }
        Plan {
            tasks,
            faults,
            latency: self.ms(&[1, 10, 50, 100]),
            clients: vec![self::client(5_000, 30_000); clients.into()],
            is_busy: false,
        }
    }

    /// Calls are dropped while they wait in the queue and their messages do not arrive.
    fn called_back(&mut self) -> Plan {
        let mut tasks = Vec::new();
        for lock in 0..LOCKS {
            let held = step(Mode::Plain, &[lock], self.between(1_000, 20_000));
            tasks.push(task(0, 0, Owning::Call, vec![held]));
        }
        let owner = self.pick(&[Owning::Call, Owning::Call, Owning::Task]);
        for _ in 0..self.up_to(1, 3) {
            let mode = self.pick(&[Mode::Plain, Mode::Several, Mode::Several]);
            let mode = mode.unwrap_or(Mode::Plain);
            let dropped = Step {
                drop_after: Some(ms(self.between(200, 1_500))),
                ..step(mode, &self.locks(mode), 100)
            };
            let at = self.between(100, 1_000);
            tasks.push(task(1, at, owner.unwrap_or(Owning::Call), vec![dropped]));
        }
        let faults = (0..self.up_to(1, 3)).map(|_| {
            let cut = FaultKind::CutOne {
                client: 1,
                connection: self.0.usize(0..2),
                to_server: !self.one_in(4),
                to_host: !self.one_in(4),
                lasts: ms(self.between(100, 2_500)),
                arrives: false,
            };
            fault(self.between(200, 2_000), cut)
        });
        Plan {
            faults: faults.collect(),
            tasks,
            latency: self.ms(&[1, 10, 50]),
            clients: vec![client(5_000, 30_000); 2],
            is_busy: self.one_in(4),
        }
    }

    /// Owners that hold a lock ask for it once more with a longer lease, together with another lock
    /// that they cannot have.
    fn refused_beside_a_guard(&mut self) -> Plan {
        let lock = self.0.u8(1..LOCKS);
        let other = step(Mode::Plain, &[lock], self.between(5_000, 20_000));
        let mut tasks = vec![task(0, 0, Owning::Call, vec![other])];
        for _ in 0..self.up_to(1, 2) {
            let refused = (0..self.up_to(1, 2)).map(|_| Step {
                verb: if self.one_in(2) {
                    Verb::Try
                } else {
                    Verb::Within(ms(self.between(1, 500)))
                },
                lease: Some(ms(20_000)),
                ..step(Mode::Several, &[0, lock], 100)
            });
            let inside = refused.collect();
            let held = Step {
                inside,
                renews: self.one_in(3),
                ..step(Mode::Plain, &[0], self.between(5_000, 12_000))
            };
            tasks.push(task(1, self.between(100, 500), Owning::Task, vec![held]));
        }
        Plan {
            tasks,
            latency: self.ms(&[0, 1, 10, 50]),
            clients: vec![client(5_000, 2_000); 2],
            faults: Vec::new(),
            is_busy: self.one_in(4),
        }
    }

    /// One owner's calls are granted by word that does not arrive, for the session connection is
    /// cut and then ends, while others of its calls hold the same or take it meanwhile.
    fn granted_unheard(&mut self) -> Plan {
        let mut tasks = Vec::new();
        for _ in 0..self.up_to(1, 2) {
            let steps = (0..4).map(|_| {
                let lock = self.0.u8(0..2);
                step(Mode::Plain, &[lock], self.between(100, 1_200))
            });
            let steps = steps.collect();
            tasks.push(task(0, self.between(0, 300), Owning::Call, steps));
        }
        let is_shared = self.one_in(2);
        for _ in 0..self.up_to(1, 3) {
            let steps = (0..self.up_to(2, 4)).map(|_| {
                let lease = [None, Some(ms(200)), Some(ms(500))];
                let (lease, hold) = (self.pick(&lease).flatten(), self.between(300, 2_000));
                let inside = Step {
                    lease,
                    ..step(Mode::Several, &[0, 1], 100)
                };
                let once = Step {
                    verb: if self.one_in(2) {
                        Verb::Try
                    } else {
                        Verb::Lock
                    },
                    lease,
                    ..step(Mode::Plain, &[0], hold)
                };
                let nested = Step {
                    inside: vec![inside],
                    ..step(Mode::Plain, &[0], hold)
                };
                if is_shared && !self.one_in(3) {
                    once
                } else {
                    nested
                }
            });
            let steps = steps.collect();
            let owner = if is_shared {
                Owning::Shared
            } else {
                Owning::Task
            };
            tasks.push(task(1, self.between(0, 300), owner, steps));
        }
        let mut at = 0;
        let faults = (0..self.up_to(2, 4)).map(|_| {
            at += self.between(300, 1_500);
            let cut = FaultKind::CutOne {
                client: 1,
                connection: self.0.usize(0..2),
                to_server: true,
                to_host: true,
                lasts: ms(self.between(200, 1_400)),
                arrives: false,
            };
            fault(at, cut)
        });
        Plan {
            faults: faults.collect(),
            tasks,
            latency: self.ms(&[1, 10, 50, 100]),
            clients: vec![client(5_000, 30_000); 2],
            is_busy: self.one_in(3),
        }
    }

    /// A wait is granted by word that does not arrive, and the lease ends; then another call of the
    /// owner takes the lock, and then the session connection ends, with the word of the first.
    fn taken_beside_what_is_unheard(&mut self) -> Plan {
        let freed = self.between(800, 1_500);
        let first = step(Mode::Plain, &[0], freed);
        let waits = Step {
            lease: Some(ms(200)),
            ..step(Mode::Plain, &[0], 100)
        };
        let mut tasks = vec![
            task(0, 0, Owning::Call, vec![first]),
            task(1, self.between(100, 400), Owning::Shared, vec![waits]),
        ];
        for _ in 0..self.up_to(1, 3) {
            let at = freed + self.between(100, 1_200);
            let hold = self.between(500, 2_000);
            let tries = Step {
                verb: Verb::Try,
                ..step(Mode::Plain, &[0], hold)
            };
            tasks.push(task(1, at, Owning::Shared, vec![tries]));
        }
        let cut = FaultKind::CutOne {
            client: 1,
            connection: self.0.usize(0..2),
            to_server: true,
            to_host: true,
            lasts: ms(self.between(700, 1_400)),
            arrives: false,
        };
        Plan {
            tasks,
            faults: vec![fault(freed - self.between(0, 400), cut)],
            latency: self.ms(&[0, 1, 10, 50]),
            clients: vec![client(5_000, 30_000); 2],
            is_busy: self.one_in(4),
        }
    }

    /// Sessions end, some in the same moment, at a server that is busy: with locks that their
    /// owners hold once or twice, and while they take and give back. Many others wait for the same
    /// locks.
    fn sessions_end(&mut self) -> Plan {
        let grace = self.pick(&[0, 0, 500]).unwrap_or(0);
        let mut clients = vec![client(grace, 30_000); 2];
        clients.extend([client(5_000, 30_000); 2]);
        let read_writes = self.one_in(2);
        let mut tasks = Vec::new();
        for number in 0..self.up_to(2, 4) {
            let steps = (0..self.up_to(2, 4)).map(|_| self.ending_step(read_writes));
            let mut steps: Vec<_> = steps.collect();
            let owner = self.pick(&[Owning::Task, Owning::Shared, Owning::Call]);
            let owner = owner.unwrap_or(Owning::Task);
            if owner == Owning::Call {
                // It would wait for itself.
                for step in &mut steps {
                    step.inside.clear();
                }
            }
            let client = usize::from(number % 2);
            tasks.push(task(client, self.between(0, 100), owner, steps));
        }
        for number in 0..self.up_to(2, 6) {
            let steps = (0..self.up_to(1, 4)).map(|_| self.waiting_step(read_writes));
            let steps = steps.collect();
            let client = usize::from(2 + number % 2);
            tasks.push(task(client, self.between(0, 200), Owning::Call, steps));
        }
        let mut faults = Vec::new();
        for _ in 0..self.up_to(1, 5) {
            let at = self.between(50, 1_200);
            let both = self.one_in(2);
            for client in 0..2 {
                let connection = self.0.usize(0..2);
                let kind = match self.0.u8(0..6) {
                    0 => FaultKind::Kill(client),
                    1 | 2 => FaultKind::Reset(client),
                    _ => FaultKind::ResetOne { client, connection },
                };
                if both || self.one_in(2) {
                    faults.push(fault(at, kind));
                }
            }
        }
        Plan {
            tasks,
            faults,
            clients,
            latency: self.ms(&[0, 0, 1, 2]),
            is_busy: !self.one_in(4),
        }
    }

    /// A step of an owner whose session ends.
    fn ending_step(&mut self, read_writes: bool) -> Step {
        let hold = self.between(0, 400);
        let end = self.end();
        if read_writes {
            let reads = self.one_in(2);
            let inside = reads.then(|| step(Mode::Read, &[READ_WRITE], self.between(0, 200)));
            return Step {
                inside: inside.into_iter().collect(),
                downgrades: !reads && !self.one_in(3),
                end,
                ..step(Mode::Write, &[READ_WRITE], hold)
            };
        }
        let mode = self.pick(&[Mode::Plain, Mode::Several]);
        let mode = mode.unwrap_or(Mode::Plain);
        let locks: &[u8] = if mode == Mode::Plain { &[0] } else { &[0, 1] };
        Step {
            lease: self.one_in(3).then(|| ms(200)),
            end,
            ..step(mode, locks, hold)
        }
    }

    fn waiting_step(&mut self, read_writes: bool) -> Step {
        let hold = self.between(0, 150);
        if read_writes {
            let mode = self.pick(&[Mode::Write, Mode::Write, Mode::Read]);
            return step(mode.unwrap_or(Mode::Write), &[READ_WRITE], hold);
        }
        match self.0.u8(0..4) {
            0 => step(Mode::Several, &[1, 0], hold),
            1 => step(Mode::Plain, &[1], hold),
            _ => step(Mode::Plain, &[0], hold),
        }
    }
}
