//! The figures, as they are now and as they are kept in `figures.txt`.

use std::fs;
use std::process::ExitCode;

use crate::operations::YARDSTICK;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/instructions/figures.txt");

/// Instructions of each operation, in the order in which they were counted.
pub(crate) struct Figures {
    server: String,
    of: Vec<(String, u64)>,
}

/// The increase that is tolerated, in percent. Two runs of the same module differ by a fifth of
/// that, and in what blocks by half.
const TOLERANCE: f64 = 1.0;

impl Figures {
    pub(crate) fn new(server: &str) -> Self {
        Self {
            server: server.to_owned(),
            of: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, name: &str, instructions: u64) {
        self.of.push((name.to_owned(), instructions));
    }

    /// The kept ones; none are kept before the first time.
    pub(crate) fn read() -> Self {
        let text = fs::read_to_string(PATH).unwrap_or_default();
        let mut lines = text.lines();
        let mut kept = Self::new(lines.next().unwrap_or_default());
        for (number, name) in lines.filter_map(|line| line.trim_start().split_once(' ')) {
            kept.add(name.trim(), number.parse().unwrap());
        }
        kept
    }

    pub(crate) fn write(&self) {
        let line = |(name, number): &(String, u64)| format!("{number:>7}  {name}\n");
        let lines: String = self.of.iter().map(line).collect();
        fs::write(PATH, format!("{}\n{lines}", self.server)).unwrap();
        print!("accepted:\n{lines}");
    }

    fn find(&self, name: &str) -> Option<u64> {
        let found = self.of.iter().find(|(of, _)| of == name);
        found.map(|(_, number)| *number)
    }

    /// Prints the figures beside the kept ones. Fails if one has grown, unless nothing can be said
    /// of that because it is another server.
    pub(crate) fn compare(&self, kept: &Self) -> ExitCode {
        let yardstick = self.find(YARDSTICK).unwrap();
        println!(
            "{:<36} {:>8} {:>6} {:>8}",
            "instructions", "now", "x", "kept"
        );
        let mut grown = false;
        for (name, now) in &self.of {
            let times = *now as f64 / yardstick as f64;
            print!("{name:<36} {now:>8} {times:>6.2}");
            let Some(before) = kept.find(name) else {
                println!("        -");
                continue;
            };
            let percent = (*now as f64 / before as f64 - 1.0) * 100.0;
            let word = match percent {
                more if more > TOLERANCE => "COSTS MORE",
                less if less < -TOLERANCE => "costs less",
                _ => "",
            };
            grown |= percent > TOLERANCE;
            println!(" {before:>8} {percent:>+6.1} %  {word}");
        }
        println!();
        if self.is_other_server(kept) {
            println!("not compared: the kept figures are of another build of the server");
            return ExitCode::SUCCESS;
        }
        if grown {
            println!("an operation costs more than before: find out why, or accept the figures");
            println!("with `make instructions ACCEPT=1` and say why in the commit");
            return ExitCode::FAILURE;
        }
        ExitCode::SUCCESS
    }

    /// Whether it is another build of the server.
    fn is_other_server(&self, kept: &Self) -> bool {
        let [now, before] = [self, kept].map(|figures| figures.find(YARDSTICK).unwrap_or(0) as f64);
        self.server != kept.server || (now / before - 1.0).abs() * 100.0 > TOLERANCE
    }
}
