//! Setting the limit of permits, which is about no owner.

use std::sync::Arc;

use crate::error::Error;
use crate::flows::Context;
use crate::topology::Redirects;
use crate::wire::request;

/// Sets it where the permits are; the limit before, if there was one. It is sent once: the second
/// of two commands would tell what the first has set.
pub(crate) async fn set(
    context: &Context,
    name: &Arc<[u8]>,
    limit: u32,
) -> Result<Option<u32>, Error> {
    let router = &context.router;
    if context.background.closing.is_cancelled() {
        return Err(Error::shut_down());
    }
    let mut redirects = Redirects::new(router, name);
    let mut route = router.route(name);
    loop {
        let error = match route.send(request::limit(name, limit)).await {
            Ok(before) => return Ok(u32::try_from(before).ok().filter(|before| *before > 0)),
            Err(error) => error,
        };
        route = redirects.next(error, &route, None).await?.route;
    }
}
