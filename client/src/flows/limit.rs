//! Setting the limit of permits, which is about no owner.

use std::sync::Arc;

use crate::error::Error;
use crate::flows::Context;
use crate::topology::Route;
use crate::wire::request;

/// Sets it where the permits are; the limit before, if there was one. It is sent once: the second
/// of two commands would tell what the first has set.
pub(crate) async fn set(
    context: &Context,
    name: &Arc<[u8]>,
    limit: u32,
) -> Result<Option<u32>, Error> {
    if context.background.closing.is_cancelled() {
        return Err(Error::shut_down());
    }
    let ask = |route: Route, _| route.send(request::limit(name, limit));
    let before = context.router.carry_out(name, false, ask).await?;
    Ok(u32::try_from(before).ok().filter(|before| *before > 0))
}
