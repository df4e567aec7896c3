//! `rlock limit`: how many permits may be out, for all who ask for them.

use std::os::unix::ffi::OsStrExt as _;

use redis::cmd;
use serde_json::{Value as Json, json};

use crate::admin::info::{self, Permits, holders};
use crate::args::Limit;
use crate::exit::Failure;
use crate::reply::{given, list, number, say, say_json, shown};
use crate::server::Fleet;

pub(super) async fn limit(fleet: &Fleet, options: &Limit) -> Result<u8, Failure> {
    match options.most {
        Some(limit) => set(fleet, options, limit).await,
        None => tell(fleet, options).await,
    }
}

async fn tell(fleet: &Fleet, options: &Limit) -> Result<u8, Failure> {
    let info = info::ask(fleet, &options.name).await?;
    let name = given(&options.name);
    let permits = Permits::of(&info);
    let is_used = !holders(&info).is_empty() || !list(&info, "queue").is_empty();
    if permits.is_none() && is_used {
        let text = format!("{} is a lock, which has no permits", shown(&name));
        return Err(Failure::unavailable(text));
    }
    if options.json {
        say_json(&json!({
            "limit": info.get("limit"),
            "permits": number(&info, "permits"),
            "waiters": number(&info, "waiters"),
        }))?;
    } else {
        say(permits.unwrap_or_default().headline(&name))?;
    }
    Ok(0)
}

async fn set(fleet: &Fleet, options: &Limit, limit: u32) -> Result<u8, Failure> {
    let mut command = cmd("RLOCK.LIMIT");
    command.arg(options.name.as_bytes()).arg(limit);
    let before = fleet.ask_for(&command).await?.as_i64().unwrap_or_default();
    if options.json {
        let or_null = |limit: i64| (limit > 0).then_some(limit).map_or(Json::Null, Json::from);
        say_json(&json!({ "before": or_null(before), "limit": or_null(limit.into()) }))?;
        return Ok(0);
    }
    say(match (before, limit) {
        (0, 0) => "no limit was set".to_owned(),
        (before, 0) => format!("the limit was {before}, and none is set now"),
        (0, limit) => format!("the limit is {limit}, and none was set before"),
        (before, limit) => format!("the limit is {limit}, and was {before} before"),
    })?;
    Ok(0)
}
