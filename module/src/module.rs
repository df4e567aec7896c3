//! The load and the unload of the module: its options, its commands, and the events that it
//! listens to.

use crate::commands;
use crate::config;
use crate::driving::{changes, pump};
use crate::ffi::{self, Ctx};
use crate::info;
use crate::memory::state;
use redis_module::alloc::RedisAlloc;
use redis_module::{Context, RedisString, Status, redis_module};

/// The version in `MODULE LIST`: this crate's version as one number, 1.2.3 as 10203.
const VERSION: i32 = 200;

redis_module! {
    name: "rlock",
    version: VERSION,
    allocator: (RedisAlloc, RedisAlloc),
    data_types: [],
    init: init,
    deinit: deinit,
}

fn init(context: &Context, args: &[RedisString]) -> Status {
    done_or_logged(context, start(context, args))
}

/// The end of a load or an unload. If it failed, the reason goes into the server's log.
fn done_or_logged(context: &Context, result: Result<(), String>) -> Status {
    match result {
        Ok(()) => Status::Ok,
        Err(reason) => {
            Ctx::of(context).log_warning(&reason);
            Status::Err
        }
    }
}

/// Declares the commands. They are not in the table above, because handlers declared there get
/// every argument decoded and copied first.
fn start(context: &Context, args: &[RedisString]) -> Result<(), String> {
    // If arguments were ignored, a misspelt option would silently have no effect.
    if let Some(argument) = args.first() {
        return Err(format!(
            "rlock takes no arguments, and '{}' is one: options are lines `rlock.NAME value` of \
             the configuration, or follow CONFIG in MODULE LOADEX",
            argument.as_slice().escape_ascii()
        ));
    }
    ffi::check_api().map_err(|name| {
        format!("rlock needs Redis 7.0 or Valkey 7.2, this server has no {name}")
    })?;
    log_panics();
    let ctx = Ctx::of(context);
    config::register(context);
    ffi::load_options(ctx);
    ffi::choose_commands(ctx).map_err(|missing| {
        format!(
            "rlock needs these commands, and the server has none of these names: {missing}. Take \
             their rename-command lines out of its configuration"
        )
    })?;
    ffi::set_options(ctx);
    ffi::add_category(ctx);
    commands::register_all(ctx)
        .map_err(|name| format!("the server refused the command {}", name.to_string_lossy()))?;
    ffi::register_info::<info::Section>(ctx);
    changes::follow_server(ctx);
    changes::start_tokens();
    changes::start_grant_delay();
    changes::take_options();
    Ok(())
}

/// Refuses the unload while clients wait or sessions hold locks, and at all times on servers that
/// it could crash.
fn deinit(context: &Context) -> Status {
    done_or_logged(context, stop(context))
}

fn stop(context: &Context) -> Result<(), String> {
    if ffi::looks_commands_up_ahead() && changes::at_work() {
        return Err(
            "rlock cannot be unloaded: this server parses pipelined commands before it runs them, \
             and would crash if one of rlock's were among them. To remove the module, take its \
             loadmodule line and the rlock.* options out of the configuration file and restart"
                .to_owned(),
        );
    }
    let waiters = state::with(|state| state.locks.gauges().waiters);
    if waiters > 0 {
        return Err(format!(
            "rlock cannot be unloaded, {waiters} wait for a lock"
        ));
    }
    if changes::at_work() && pump::is_due() {
        return Err("rlock cannot be unloaded, sessions hold locks".to_owned());
    }
    pump::stop(Ctx::of(context));
    state::clear();
    config::clear();
    Ok(())
}

/// Logs a panic. It is caught before it can stop the server, so the log must say that it happened.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        ffi::log_warning(&format!("rlock panicked, please report it: {panic}"));
    }));
}
