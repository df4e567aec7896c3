//! The line about the holder of the lock that `rlock run` prints while it waits.

use std::convert::Infallible;
use std::io::{self, IsTerminal as _};
use std::time::Duration;

use serde_json::Value as Json;
use tokio::time::sleep;

use crate::admin::info;
use crate::connect::{Connection, label};
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
        let (holders, is_known) = ask(plan, connection).await;
        // A server that is far away takes its time, and nobody may hold the lock. A user who may
        // not ask hears only that it waits.
        if plan.verbose || !is_known || !holders.is_empty() {
            warn(format!("waiting for {}{holders}", shown_names(&plan.names)));
        }
    }
    std::future::pending().await
}

/// The holders of the locks, and whether all could be asked for.
async fn ask(plan: &Plan, connection: &Connection) -> (String, bool) {
    let (mut holders, mut is_known) = (String::new(), true);
    let Ok(fleet) = Fleet::connect(connection).await else {
        return (holders, false);
    };
    for name in &plan.names {
        match info::ask(&fleet, name).await {
            Ok(info) => holders.extend(held_by(&shown(&given(name)), &info)),
            Err(_) => is_known = false,
        }
    }
    (holders, is_known)
}

/// A part of the line, if another process holds the lock. Of several read-write locks this one may
/// hold some already.
fn held_by(name: &str, info: &Json) -> Option<String> {
    let (who, held) = (info::who_holds(info), info::longest_held(info));
    if info::holders(info).is_empty() || who.starts_with(&label()) {
        return None;
    }
    let held = match held {
        Json::Null => String::new(),
        held => format!(" for {}", time(&held)),
    };
    let waiters = number(info, "waiters");
    Some(format!(
        "; {name} is held by {who}{held}, {waiters} waiting"
    ))
}
