//! Refusing a wait that could never end: walks the core's search and reads the holders it asks for.

use crate::ffi::{Ctx, OwnedStr, Str};
use crate::keys::OpenLock;
use crate::state;
use rlock_core::request::Acquire;
use rlock_core::{Found, LockRef, Refusal};

/// Refuses the wait of an ACQUIRE if it closes a circle.
pub(crate) fn refuse(ctx: Ctx<'_>, name: Str<'_>, request: &Acquire<'_>) -> Result<(), Refusal> {
    let at = LockRef {
        db: ctx.db(),
        name: name.bytes(),
    };
    let (mut search, mut found) = state::with(|state| state.locks.search_deadlock(at, request));
    loop {
        match found {
            Found::Nothing => return Ok(()),
            Found::Circle(refusal) => return Err(refusal),
            Found::Ask(lock) => {
                ctx.select_db(lock.db);
                let name = OwnedStr::new(&lock.name);
                let holders = OpenLock::to_read(ctx, name.as_str()).holders();
                ctx.select_db(at.db);
                found = state::with(|state| state.locks.search_on(&mut search, &holders));
            }
        }
    }
}
