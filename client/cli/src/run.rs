//! `rlock run`: a command under a lock.
//!
//! Two processes: this one has the connections, the lock and the terminal; its [guardian] has the
//! command. This one sends the guardian a deadline, and moves it on as long as the lock is
//! confirmed. Without a new deadline the guardian kills the command in time.

mod clock;
mod group;
pub(crate) mod guardian;
mod held;
mod message;
pub(crate) mod signals;
mod supervise;
mod terminal;
mod waiting;

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::Duration;

use nix::libc;
use rlock_client::Error;
use tokio::time::{Instant, sleep_until, timeout};

use crate::args::{OnLost, Run};
use crate::connect::Connection;
use crate::duration::shown;
use crate::exit::{self, Failure, warn};
use crate::reply::shown_names;
use crate::run::held::{Held, Kind, Wait};
use crate::run::signals::Signals;
use crate::run::supervise::{Ended, Supervisor};
use crate::sys;

/// A dead `rlock`'s lock has to stay for as long as it takes to kill the command.
const GRACE_MIN: Duration = Duration::from_secs(1);

/// The longest grace that the server allows.
const GRACE_MAX: Duration = Duration::from_secs(3_600);

const LEASE: Duration = Duration::from_secs(30);
const GRACE: Duration = Duration::from_secs(5);
const KILL_AFTER: Duration = Duration::from_secs(1);

/// How long the queue is left for when a signal ends the wait, if the server does not answer.
const LEAVE: Duration = Duration::from_secs(2);

/// The options, with the defaults filled in and every bound checked.
struct Plan {
    names: Vec<OsString>,
    words: Vec<OsString>,
    kind: Kind,
    wait: Wait,
    conflict: u8,
    lease: Duration,
    grace: Duration,
    at_least: Duration,
    max: Option<Duration>,
    on_lost: OnLost,
    kill_after: Duration,
    verbose: bool,
}

/// Runs the command; its status.
pub(crate) fn run(run: Run, connection: &Connection) -> Result<u8, Failure> {
    let plan = Plan::new(run)?;
    // Before the runtime, and beside connecting: it costs no time of its own.
    let (guardian, link) = guardian::spawn().map_err(|error| no_guardian(&error))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::unavailable(format!("no runtime: {error}")))?;
    let outcome = runtime.block_on(plan.carry_out(connection, guardian, link));
    // This does not wait for a name that is being resolved.
    runtime.shutdown_background();
    let ended = outcome?;
    if ended.by_ctrl_c {
        sys::end_as_ctrl_c();
    }
    if ended.interrupted {
        sys::end_by(libc::SIGINT);
    }
    Ok(ended.status)
}

fn no_guardian(error: &io::Error) -> Failure {
    Failure::new(
        exit::CANNOT_RUN,
        format!("cannot start the guardian process: {error}"),
    )
}

impl Plan {
    fn new(run: Run) -> Result<Self, Failure> {
        let lease = run.lease.unwrap_or(LEASE);
        let grace = run.grace.unwrap_or(GRACE.min(lease));
        // A group that is told to end gets this time while the lock is still held.
        let longest = grace.checked_div(2).unwrap_or_default();
        let kill_after = run.kill_after.unwrap_or(KILL_AFTER.min(longest));
        let kind = match (run.permits, run.shared, run.exclusive) {
            (Some(asked), ..) => Kind::Permits(asked),
            (_, true, _) => Kind::Read,
            (_, _, true) => Kind::Write,
            _ => Kind::Plain,
        };
        if run.permits.is_some() && run.names.len() > 1 {
            // Each semaphore has a limit of its own, and an owner of its own would hold it.
            return Err(Failure::usage(format!(
                "--permits is for one NAME, and {} are given",
                run.names.len()
            )));
        }
        if lease < GRACE_MIN {
            return Err(Failure::usage(format!(
                "--lease {}: at least {min}: the lock of an rlock that was killed has to stay \
                 until the command has ended, and {min} is the shortest --grace for that",
                shown(lease),
                min = shown(GRACE_MIN)
            )));
        }
        if grace < GRACE_MIN || grace > lease.min(GRACE_MAX) {
            return Err(Failure::usage(format!(
                "--grace {}: from {} to the lease, {}, and at most {}: the command of an rlock \
                 that was killed is ended within it",
                shown(grace),
                shown(GRACE_MIN),
                shown(lease),
                shown(GRACE_MAX)
            )));
        }
        if kill_after > longest {
            return Err(Failure::usage(format!(
                "--kill-after {}: at most half of the grace, {}; set a longer --grace as well",
                shown(kill_after),
                shown(longest)
            )));
        }
        Ok(Self {
            names: run.names,
            words: run.command,
            kind,
            wait: match (run.nonblock, run.timeout) {
                (true, _) => Wait::AtMost(Duration::ZERO),
                (_, Some(time)) => Wait::AtMost(time),
                _ => Wait::Forever,
            },
            conflict: run.conflict_exit_code,
            lease,
            grace,
            at_least: run.at_least.unwrap_or_default(),
            max: run.max,
            on_lost: run.on_lost,
            kill_after,
            verbose: run.verbose,
        })
    }

    async fn carry_out(
        &self,
        connection: &Connection,
        guardian: Child,
        link: UnixStream,
    ) -> Result<Ended, Failure> {
        let mut signals = Signals::listen().map_err(|error| unexpected(&error))?;
        let client = tokio::select! {
            client = connection.client(self.lease, self.grace) => client?,
            signal = signals.next() => return Err(Failure::by_signal(signal)),
        };
        let begun = Instant::now();
        let taking = Held::take(&client, &self.names, self.kind, self.wait);
        let held = tokio::select! {
            held = taking => held.map_err(|error| self.not_taken(&error, connection)),
            never = waiting::say_who_holds(self, connection) => match never {},
            signal = signals.next() => Err(Failure::by_signal(signal)),
        };
        if held.is_err() {
            // The wait was given up, with the locks that it had so far: this tells the server.
            let _ = timeout(LEAVE, client.shutdown()).await;
        }
        let held = held?;
        let granted = Instant::now();
        if self.verbose {
            let took = shown(whole_ms(begun.elapsed()));
            warn(format!("got {} after {took}", shown_names(&self.names)));
        }
        let ended = Supervisor::new(self, &held, &mut signals, guardian, link);
        let ended = ended.map_err(|error| unexpected(&error))?.supervise().await;
        let told = ended.as_ref().is_ok_and(|ended| ended.lost);
        let signal = self.give_back(held, granted, &mut signals, told).await;
        let mut ended = ended?;
        ended.interrupted |= signal == Some(libc::SIGINT);
        Ok(ended)
    }

    fn not_taken(&self, error: &Error, connection: &Connection) -> Failure {
        if error.is_not_acquired() {
            return Failure::silent(self.conflict);
        }
        let mut failure = connection.failure(error, &self.names);
        if error.is_refused() && error.to_string().contains("NOLIMIT") {
            failure.text.push_str(
                "; --permits N/LIMIT names a limit, and `rlock limit NAME LIMIT` sets one for all",
            );
        }
        failure
    }

    /// The command has gone; the lock stays for its shortest time. Only SIGINT ends that, and is
    /// returned: a service manager that stops this process does not make two hosts' clocks agree.
    async fn give_back(
        &self,
        held: Held,
        granted: Instant,
        signals: &mut Signals,
        told: bool,
    ) -> Option<i32> {
        let until = granted.checked_add(self.at_least).unwrap_or(granted);
        let signal = loop {
            tokio::select! {
                () = sleep_until(until) => break None,
                _ = held.lost() => break None,
                signal = signals.any_to_end() => if signal == libc::SIGINT {
                    break Some(signal);
                },
            }
            let left = shown(whole_ms(until.duration_since(Instant::now())));
            warn(format!("keeping the lock for {left} more (--at-least)"));
        };
        if let Err(error) = held.unlock().await {
            self.not_given_back(&error, told);
        }
        signal
    }

    fn not_given_back(&self, error: &Error, told: bool) {
        if error.to_string().contains("READONLY ") {
            let lease = shown(self.lease);
            warn(format!(
                "the lock could not be given back: the server is a replica now, as after a \
                 failover, and the new primary keeps the lock for the rest of its lease, {lease} \
                 at most; --sentinel, --cluster or an address that moves with the primary, and a \
                 --grace longer than a failover, let a command live through it"
            ));
        } else if !error.is_lost() {
            let grace = shown(self.grace);
            warn(format!(
                "the lock could not be given back ({error}); the server frees it within {grace}, \
                 or when its lease ends"
            ));
        } else if !told {
            warn("the lock was lost before it was given back: another may have had it meanwhile");
        }
    }
}

fn whole_ms(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn unexpected(error: &io::Error) -> Failure {
    Failure::new(exit::CANNOT_RUN, format!("cannot set up: {error}"))
}
