//! The line about the holder of the lock that `rlock run` prints while it waits.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use serde_json::Value as Json;
use tokio::time::sleep;

use crate::admin::info;
use crate::connect::Connection;
use crate::exit::warn;
use crate::reply::{given, number, shown, shown_names, time};
use crate::run::Plan;
use crate::run::held::Wait;
use crate::server::Fleet;

/// A wait has lasted for this long when the line is printed: on a terminal, and with --verbose.
const PATIENCE: Duration = Duration::from_secs(1);
const SHORT_PATIENCE: Duration = Duration::from_millis(200);

/// Prints the line once, if the wait lasts. The caller drops this future when the wait ends.
pub(super) async fn say_who_holds(plan: &Plan, connection: &Connection) -> Infallible {
    let is_heard = plan.verbose || io::stderr().is_terminal();
    if is_heard && plan.wait != Wait::AtMost(Duration::ZERO) {
        let patience = if plan.verbose {
            SHORT_PATIENCE
        } else {
            PATIENCE
        };
        sleep(patience).await;
        // A user who may not ask hears only that it waits.
        let mut line = format!("waiting for {}", shown_names(&plan.names));
        if let Ok(fleet) = Fleet::connect(connection).await {
            for name in &plan.names {
                let info = info::ask(&fleet, name).await.unwrap_or_default();
                line.extend(held_by(&shown(&given(name)), &info));
            }
        }
        warn(line);
    }
    std::future::pending().await
}

/// A part of the line, if the lock is held.
fn held_by(name: &str, info: &Json) -> Option<String> {
    if info::holders(info).is_empty() {
        return None;
    }
    let (who, held) = (info::who_holds(info), info::longest_held(info));
    let held = match held {
        Json::Null => String::new(),
        held => format!(" for {}", time(&held)),
    };
    let waiters = number(info, "waiters");
    Some(format!(
        "; {name} is held by {who}{held}, {waiters} waiting"
    ))
}
