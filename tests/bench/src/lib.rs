//! The benchmark: `make bench`. Everything is a ratio within one run, because the machines that it
//! runs on are small, shared and noisy: contenders take turns in short rounds, and neighbouring
//! rounds are compared.
//!
//! A part measures (`measure`), and makes its tables and plots from its file alone (`report`,
//! `plots`), so that these can be made anew: [`Words::plots_only`].
//!
//! - `uncontended`, `hand_over`, `contended`, `crates`, `growth`, `memory`, `tax`, `kept`,
//!   `servers`, `network`, `rest`: the parts
//! - `redisson`: the one contender that is no Rust, for `crates`
//! - `host`, `load`, `wire`, `waiters`: servers, and the commands sent to them
//! - `rounds`, `results`, `numbers`, `report`, `plot`: turns, files, figures, tables, pictures

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::missing_panics_doc,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::print_stdout,
    reason = "a program that prints, and stops when something is not as it should be"
)]
#![cfg_attr(
    test,
    allow(clippy::float_cmp, reason = "values that were put in, not computed")
)]

mod allocations;
mod contended;
mod crates;
mod growth;
mod hand_over;
mod host;
mod kept;
mod load;
mod memory;
mod network;
mod numbers;
mod plot;
mod redisson;
mod report;
mod rest;
mod results;
mod rounds;
mod servers;
mod tax;
mod uncontended;
mod waiters;
mod wire;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::report::Report;
use crate::results::Results;
use crate::rounds::Run;

/// The benchmark's arguments.
#[derive(Debug)]
pub struct Words {
    /// Little of everything, to see that it works.
    pub quick: bool,
    /// Measures nothing and makes the tables and plots from the files that are there.
    pub plots_only: bool,
    /// The parts to run, by name; none: all.
    pub parts: Vec<String>,
    /// Where files, tables and plots go.
    pub folder: PathBuf,
}

struct Part {
    name: &'static str,
    measure: fn(&Run) -> Results,
    report: fn(&Results) -> Report,
    plots: fn(&Results) -> Vec<(&'static str, String)>,
}

const PARTS: [Part; 11] = [
    Part {
        name: uncontended::PART,
        measure: uncontended::measure,
        report: uncontended::report,
        plots: uncontended::plots,
    },
    Part {
        name: hand_over::PART,
        measure: hand_over::measure,
        report: hand_over::report,
        plots: hand_over::plots,
    },
    Part {
        name: contended::PART,
        measure: contended::measure,
        report: contended::report,
        plots: contended::plots,
    },
    Part {
        name: crates::PART,
        measure: crates::measure,
        report: crates::report,
        plots: crates::plots,
    },
    Part {
        name: growth::PART,
        measure: growth::measure,
        report: growth::report,
        plots: growth::plots,
    },
    Part {
        name: memory::PART,
        measure: memory::measure,
        report: memory::report,
        plots: |_| Vec::new(),
    },
    Part {
        name: tax::PART,
        measure: tax::measure,
        report: tax::report,
        plots: tax::plots,
    },
    Part {
        name: kept::PART,
        measure: kept::measure,
        report: kept::report,
        plots: kept::plots,
    },
    Part {
        name: servers::PART,
        measure: servers::measure,
        report: servers::report,
        plots: servers::plots,
    },
    Part {
        name: network::PART,
        measure: network::measure,
        report: network::report,
        plots: network::plots,
    },
    Part {
        name: rest::PART,
        measure: rest::measure,
        report: rest::report,
        plots: |_| Vec::new(),
    },
];

/// The line that names the machine and the server.
const RUN: &str = "run.txt";
/// The main results, a sentence each: the gains, and the costs.
const FIGURES: &str = "figures.md";

/// Runs the benchmark.
pub fn run(words: &Words) {
    fs::create_dir_all(&words.folder).unwrap();
    if !words.plots_only {
        measure(words);
    }
    let text = tables(&words.folder);
    println!("{text}");
    let folder = words.folder.canonicalize().unwrap();
    println!("Written to {}", folder.display());
}

fn measure(words: &Words) {
    host::open_many_files();
    let run = Run {
        quick: words.quick,
        folder: words.folder.clone(),
        cores: host::Cores::take(),
    };
    let before = host::load_average();
    let begun = Instant::now();
    for part in &PARTS {
        if words.parts.is_empty() || words.parts.iter().any(|name| name == part.name) {
            let part_begun = Instant::now();
            (part.measure)(&run).write(&run.folder);
            println!("{}: {} s", part.name, part_begun.elapsed().as_secs());
        }
    }
    let kind = match (run.quick, words.parts.as_slice()) {
        (true, _) => "a quick run that shows only that it works".to_owned(),
        (false, []) => "a full run".to_owned(),
        (false, parts) => format!("a run of these parts alone: {}", parts.join(", ")),
    };
    let line = format!(
        "{}, {}, {}, {kind}, load average before it {before}, {} s.\n",
        run.host().name(),
        host::processor(),
        run.cores.words(),
        begun.elapsed().as_secs(),
    );
    // Parts that run alone leave the others, and the line about them, as they are.
    let file = run.folder.join(RUN);
    let others = fs::read_to_string(&file).unwrap_or_default();
    let others = if words.parts.is_empty() { "" } else { &others };
    fs::write(file, format!("{others}{line}")).unwrap();
}

/// Makes tables and plots from the files, and returns the tables.
fn tables(folder: &Path) -> String {
    let mut reports = Vec::new();
    let mut pictures = Vec::new();
    for part in &PARTS {
        let Some(results) = Results::read(part.name, folder) else {
            continue;
        };
        let mut report = (part.report)(&results);
        for (name, svg) in (part.plots)(&results) {
            fs::write(folder.join(format!("{name}.svg")), svg).unwrap();
            report.says(&format!("![{name}]({name}.svg)"));
            pictures.push(name);
        }
        reports.push(report);
    }
    let line = fs::read_to_string(folder.join(RUN)).unwrap_or_default();
    let parts: String = reports.iter().map(|report| report.text.as_str()).collect();
    let gains = reports.iter().filter_map(|report| report.gain.clone());
    let costs = reports.iter().filter_map(|report| report.cost.clone());
    let [gains, costs] = [gains.collect::<Vec<_>>(), costs.collect()].map(|lines| lines.join("\n"));
    let figures = format!("{gains}\n\nThe costs:\n\n{costs}");
    fs::write(folder.join(FIGURES), format!("{figures}\n")).unwrap();
    let text = format!(
        "# What `make bench` measured\n\n{line}\nMedians of the rounds; in brackets the least and \
         the largest of them. A ratio is the median over rounds that were neighbours. \
         [benchmark.md](../benchmark.md) has the method and its limits.\n\n{figures}\n\n{}\n\
         {parts}",
        report::targets(&reports),
    );
    let text = format!("{}\n", text.trim_end());
    fs::write(folder.join("tables.md"), &text).unwrap();
    text
}
