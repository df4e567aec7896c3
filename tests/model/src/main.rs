//! `cargo run --release -p rlock-model -- --calls=2 --cuts=2 --drops=1 --plain=1`

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "it is what the program is for"
)]

use std::env;
use std::process::ExitCode;
use std::time::Instant;

use rlock_model::{Budget, Rules, Setup, Size, search};

fn main() -> ExitCode {
    let options: Vec<String> = env::args().skip(1).collect();
    let setup = match Setup::parse(options.iter().map(String::as_str)) {
        Ok(setup) => setup,
        Err(error) => {
            eprintln!("{error}\n\n{}", help());
            return ExitCode::FAILURE;
        }
    };
    let begin = Instant::now();
    let report = search(&setup);
    println!(
        "{}: {} states, {} steps, depth {}, {} not followed, {:.1} s",
        options.join(" "),
        report.states,
        report.steps,
        report.depth,
        report.cut_off,
        begin.elapsed().as_secs_f32()
    );
    if report.violations.is_empty() {
        println!("NO VIOLATION");
        return ExitCode::SUCCESS;
    }
    report
        .violations
        .iter()
        .for_each(|violation| println!("\n{violation}"));
    ExitCode::FAILURE
}

fn help() -> String {
    let list = |names: &[(&str, u8)]| {
        let names: Vec<_> = names
            .iter()
            .map(|(name, n)| format!("--{name}={n}"))
            .collect();
        names.join(" ")
    };
    format!(
        "How often:  {}\nHow many:   {}\nRules:      --off={}\nAnd:        --first",
        list(Budget::NAMES),
        list(Size::NAMES),
        Rules::NAMES.join(",")
    )
}
