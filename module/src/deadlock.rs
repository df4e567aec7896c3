//! Refusing a wait that could never end: walks the core's search and reads the holders it asks for.

use crate::ffi::{Ctx, OwnedStr};
use crate::keys::OpenLock;
use crate::state;
use rlock_core::{CommandError, DeadlockSearch, Found, Locks};

/// Refuses a wait if it closes a circle.
pub(crate) fn refuse(
    ctx: Ctx<'_>,
    begin: impl FnOnce(&Locks) -> Option<(DeadlockSearch, Found)>,
) -> Result<(), CommandError> {
    let Some((mut search, mut found)) = state::with(|state| begin(&state.locks)) else {
        return Ok(());
    };
    let db = ctx.db();
    loop {
        match found {
            Found::Nothing => return Ok(()),
            Found::Circle(refusal) => return Err(refusal),
            Found::Ask(lock) => {
                ctx.select_db(lock.db);
                let name = OwnedStr::new(&lock.name);
                let holders = OpenLock::to_read(ctx, name.as_str()).holders();
                ctx.select_db(db);
                found = state::with(|state| state.locks.search_on(&mut search, &holders));
            }
        }
    }
}
