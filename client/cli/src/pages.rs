//! Completions for shells, and man pages: generated from the command line's own description.

use std::fs;
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Cli;
use crate::exit::Failure;
use crate::reply::say;

/// The script that a shell reads.
pub(crate) fn completions(shell: Shell) -> Result<u8, Failure> {
    // Not to standard output at once: clap panics where that is closed.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rlock", &mut script);
    say(String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// A page for the program and one for each of its commands.
pub(crate) fn man(directory: &Path) -> Result<u8, Failure> {
    let written = fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), directory));
    written.map_err(|error| {
        Failure::usage(format!("cannot write to {}: {error}", directory.display()))
    })?;
    Ok(0)
}
