//! The lengths of rounds, and the order of the contenders.

use std::path::PathBuf;
use std::time::Duration;

use rlock_tests::{Builder, Server};

use crate::host::{Cores, Host};

/// A run of the benchmark.
#[derive(Debug)]
pub(crate) struct Run {
    /// To see that it works: little of everything.
    pub(crate) quick: bool,
    /// Where the files go.
    pub(crate) folder: PathBuf,
    pub(crate) cores: Cores,
}

impl Run {
    pub(crate) fn rounds(&self, full: usize) -> usize {
        if self.quick { 3 } else { full }
    }

    /// How long a round is, in milliseconds of a full run.
    pub(crate) fn length(&self, full: u64) -> Duration {
        Duration::from_millis(if self.quick { full / 5 } else { full })
    }

    /// That many, or in a quick run at most so few.
    pub(crate) fn at_most(&self, full: u64, quick: u64) -> u64 {
        if self.quick { full.min(quick) } else { full }
    }

    /// These sizes, or in a quick run those that are not above that.
    pub(crate) fn up_to(&self, quick: u64, full: &[u64]) -> Vec<u64> {
        let sizes = full.iter().copied();
        sizes.filter(|size| !self.quick || *size <= quick).collect()
    }

    /// A server with the module.
    pub(crate) fn host(&self) -> Host {
        self.host_of(Server::builder())
    }

    pub(crate) fn host_of(&self, how: Builder) -> Host {
        Host::of(self.cores.start(how))
    }
}

/// Lets the contenders take turns, to and fro, so that none always runs after the same neighbour.
/// `turn` is told which one, and the number of the round.
pub(crate) fn alternate(contenders: usize, rounds: usize, mut turn: impl FnMut(usize, usize)) {
    for round in 0..rounds {
        for position in 0..contenders {
            let forth = round % 2 == 0;
            let contender = if forth {
                position
            } else {
                contenders - 1 - position
            };
            turn(contender, round);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contenders_run_to_and_fro() {
        let mut turns = Vec::new();
        alternate(3, 2, |contender, round| turns.push((round, contender)));
        assert_eq!(turns, [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]);
    }
}
