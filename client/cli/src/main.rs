//! The program `rlock`: see `rlock help` and docs/cli.md.
#![deny(unsafe_code)]
#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "what stands in brackets in the help of an option is not a link"
)]

use std::env;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser as _;

mod admin;
mod args;
mod connect;
mod duration;
mod exit;
mod exporter;
mod pages;
mod permits;
mod reply;
mod run;
mod server;
mod sys;
mod top;
mod url;

use args::{Cli, Command};
use exit::Failure;

fn main() -> ExitCode {
    let mut words = env::args_os();
    if words.next().is_some_and(|name| name == run::guardian::NAME) {
        return run::guardian::main(words.next().as_deref().and_then(|word| word.to_str()));
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    match carry_out(cli) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => failure.report(),
    }
}

/// Help that was asked for is no error.
fn usage(error: &clap::Error) -> ExitCode {
    let printed = error.print().and_then(|()| io::stdout().flush());
    if error.use_stderr() {
        // Nobody may be there to be told.
        return ExitCode::from(exit::USAGE);
    }
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => reply::cannot_write(&error).report(),
    }
}

fn carry_out(cli: Cli) -> Result<u8, Failure> {
    match cli.command {
        Command::Run(run) => run::run(*run, &cli.connection),
        Command::Top { every } => top::top(every, &cli.connection),
        Command::Exporter { listen } => exporter::serve(listen, &cli.connection),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { directory } => pages::man(&directory),
        command => admin::carry_out(command, &cli.connection),
    }
}
