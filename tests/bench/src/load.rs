//! Load from one thread: connections that say the same again and again, and look at every reply.

use std::time::{Duration, Instant};

use rlock_tests::Server;

use crate::host::Host;
use crate::wire::{Step, Wire};

/// As many clients as a busy service has processes, and enough to keep a server busy.
pub(crate) const CONNECTIONS: usize = 50;

/// The connections, and what each of them sends, step by step, each step when the one before has
/// been answered.
pub(crate) struct Load {
    connections: Vec<(Wire, Vec<Step>)>,
    /// How many counted operations all steps of one connection make.
    each: usize,
}

/// The results of a round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) per_second: f64,
    /// The server's CPU time for one, in microseconds.
    pub(crate) cpu_us: f64,
    /// The part of the time in which the server was busy: where it is well below 1, the load is
    /// the slower side.
    pub(crate) busy: f64,
}

impl Pace {
    pub(crate) const MEASURES: [&'static str; 3] = ["per_second", "cpu_us", "server_busy"];

    pub(crate) fn values(self) -> [f64; 3] {
        [self.per_second, self.cpu_us, self.busy]
    }
}

impl Load {
    /// `steps_of` says what the connection of that number sends; each of them has as many steps.
    pub(crate) fn new(
        server: &Server,
        connections: usize,
        each: usize,
        steps_of: impl Fn(usize) -> Vec<Step>,
    ) -> Self {
        let connection = |number| (Wire::open(server), steps_of(number));
        Self {
            connections: (0..connections).map(connection).collect(),
            each,
        }
    }

    /// Goes on for that long, and until all steps of all connections have been answered.
    ///
    /// Each connection sends its next step as soon as its reply was read, so while one is looked at
    /// here, the server has those of the others.
    pub(crate) fn round(&mut self, host: &mut Host, length: Duration) -> Pace {
        let steps = self.connections[0].1.len();
        let cpu_before = host.cpu_us();
        let begun = Instant::now();
        for (wire, all) in &mut self.connections {
            wire.send(&all[0].bytes);
        }
        let mut cycles = 0;
        let mut over = false;
        while !over {
            for step in 0..steps {
                let last = step + 1 == steps;
                over = last && begun.elapsed() >= length;
                for (wire, all) in &mut self.connections {
                    wire.expect(&all[step].lines);
                    if !over {
                        wire.send(&all[if last { 0 } else { step + 1 }].bytes);
                    }
                }
            }
            cycles += 1;
        }
        let seconds = begun.elapsed().as_secs_f64();
        let cpu = host.cpu_us() - cpu_before;
        let done = (cycles * self.connections.len() * self.each) as f64;
        Pace {
            per_second: done / seconds,
            cpu_us: cpu / done,
            busy: cpu / 1e6 / seconds,
        }
    }
}

/// Carries out many requests, a few hundred in flight at a time.
pub(crate) fn all_of(server: &Server, steps: impl Iterator<Item = Step>) {
    let mut wire = Wire::open(server);
    let mut steps = steps.peekable();
    while steps.peek().is_some() {
        let batch = Step::joined(steps.by_ref().take(500));
        wire.carry_out(&batch);
    }
}
