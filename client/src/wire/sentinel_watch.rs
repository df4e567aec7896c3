//! The task that asks the sentinels again and again whether the server in use is still the primary.
//!
//! A primary that is cut off from sentinels and replicas, and not from us, does not know that it
//! has been replaced. It goes on renewing what others may have at the new primary by then.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::{MultiplexedConnection, SendError};
use redis::{AsyncConnectionConfig, PushInfo, PushKind};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::backoff::{Backoff, LASTING, part_of, random};
use crate::error::Error;
use crate::time::part;
use crate::wire::connection::{Connector, Verdict};

/// Asks until it is aborted, with the node. That it also listens to one of them makes it quicker;
/// what is promised is that it asks.
pub(crate) async fn run(connector: Connector, grace: Duration) {
    let (told, switches) = watch::channel(String::new());
    tokio::join!(
        ask_again(&connector, interval(grace), switches),
        listen(&connector, told),
    );
}

async fn ask_again(
    connector: &Connector,
    interval: Duration,
    mut switches: watch::Receiver<String>,
) {
    let within = part(interval, ANSWER_PART);
    let mut began = Instant::now();
    let mut ended = began;
    loop {
        let soonest = ended.checked_add(PAUSE_MIN).unwrap_or(ended);
        // Counted from the start of the last question: silent sentinels do not put off the next.
        let next = began.checked_add(pause(interval)).unwrap_or(began);
        let next = next.max(soonest);
        tokio::select! {
            () = sleep_until(next) => {}
            // Not told any more once nobody may listen.
            Ok(()) = switches.changed() => {
                // Otherwise one that tells of switches without end has all asked without end.
                sleep_until(soonest).await;
                let address = switches.borrow_and_update().clone();
                follow(connector, &address, within).await;
            }
        }
        began = Instant::now();
        connector.ask_sentinels(within).await;
        ended = Instant::now();
    }
}

/// One sentinel says that the server at this address is the primary now. The others, without whom
/// nothing is believed, hear of it in a moment.
async fn follow(connector: &Connector, address: &str, within: Duration) {
    let mut backoff = Backoff::new();
    for _ in 0..FOLLOWED {
        if connector.is_at(address) || connector.ask_sentinels(within).await == Verdict::Replaced {
            return;
        }
        sleep(backoff.next()).await;
    }
}

/// Listens to one sentinel at a time, and tells the addresses of new primaries. One that does not
/// let us listen is not asked to again.
async fn listen(connector: &Connector, told: watch::Sender<String>) {
    let mut sentinels: Vec<_> = connector.endpoint().sentinels().iter().collect();
    let mut backoff = Backoff::new();
    let first = usize::try_from(random()).unwrap_or_default();
    let first = first.checked_rem(sentinels.len()).unwrap_or_default();
    sentinels.rotate_left(first);
    while let Some(sentinel) = sentinels.first() {
        let since = Instant::now();
        match subscribe(connector, sentinel, &told).await {
            Ok(subscription) => {
                subscription.closed.notified().await;
                if since.elapsed() >= LASTING {
                    backoff = Backoff::new();
                }
                sentinels.rotate_left(1);
            }
            Err(error) if error.is_refused() => drop(sentinels.remove(0)),
            Err(_) => sentinels.rotate_left(1),
        }
        sleep(backoff.next()).await;
    }
}

/// A connection on which a sentinel tells of new primaries. Dropping it closes the socket.
struct Subscription {
    closed: Arc<Notify>,
    _connection: MultiplexedConnection,
}

async fn subscribe(
    connector: &Connector,
    sentinel: &redis::Client,
    told: &watch::Sender<String>,
) -> Result<Subscription, Error> {
    let closed = Arc::new(Notify::new());
    let (gone, told) = (Arc::clone(&closed), told.clone());
    let endpoint = connector.endpoint().clone();
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_push_sender(move |push: PushInfo| -> Result<(), SendError> {
            match push.kind {
                PushKind::Disconnection => gone.notify_one(),
                PushKind::Message => {
                    let new = read_switch(push, endpoint.service());
                    if let Some((host, port)) = new {
                        // Only the latest is of interest, however many come.
                        told.send_replace(endpoint.named(&host, port));
                    }
                }
                _ => {}
            }
            Ok(())
        });
    let subscribing = async {
        let connection = sentinel.get_multiplexed_async_connection_with_config(&config);
        let mut connection = connection.await?;
        connection.subscribe(SWITCHES).await?;
        Ok(connection)
    };
    let within = connector.response_timeout();
    let connection = timeout(within, subscribing).await;
    let connection = connection.map_err(|_| Error::too_slow(within))?;
    let connection = connection.map_err(Error::could_not_connect)?;
    Ok(Subscription {
        closed,
        _connection: connection,
    })
}

/// The new primary of this service, in a message `<service> <old host> <port> <new host> <port>`.
fn read_switch(push: PushInfo, service: &str) -> Option<(String, u16)> {
    let text: String = redis::from_redis_value(push.data.into_iter().next_back()?).ok()?;
    let words: Vec<_> = text.split(' ').collect();
    let [name, _, _, host, port] = words.as_slice() else {
        return None;
    };
    let port = port.parse().ok().filter(|_| *name == service)?;
    Some(((*host).to_owned(), port))
}

/// Within which time to ask at least once.
fn interval(grace: Duration) -> Duration {
    if grace.is_zero() {
        INTERVAL_MAX
    } else {
        grace.clamp(INTERVAL_MIN, INTERVAL_MAX)
    }
}

/// From one question to the next: from a half to three quarters of the interval, by chance, so that
/// clients do not ask all at once. The rest is for the answers, and to confirm the holds or lose
/// them.
fn pause(interval: Duration) -> Duration {
    part(interval, 2).saturating_add(part_of(part(interval, 4), random()))
}

/// On which sentinels tell of new primaries.
const SWITCHES: &str = "+switch-master";

/// So often it is asked at most whether a majority of the sentinels has heard of a new primary: for
/// one to three seconds.
const FOLLOWED: u32 = 8;

/// However long the grace is, and without one: what a deposed primary keeps is nobody's for longer.
const INTERVAL_MAX: Duration = Duration::from_secs(5);

const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// A sentinel may take this part of the interval to answer: two questions and what lies between
/// them are over before the next is due.
const ANSWER_PART: u32 = 4;

/// From the end of one question to the next, whatever a sentinel tells.
const PAUSE_MIN: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;
    use redis::Value;

    #[test]
    fn it_is_asked_once_in_three_quarters_of_the_grace_and_at_most_twice_in_it() {
        for ms in [100, 500, 1_000, 5_000] {
            let grace = Duration::from_millis(ms);
            for _ in 0..100 {
                let pause = pause(interval(grace));
                assert!(pause <= part(grace.saturating_mul(3), 4), "{grace:?}");
                assert!(pause >= part(grace, 2), "{grace:?}");
            }
        }
        assert_eq!(interval(Duration::ZERO), INTERVAL_MAX);
        assert_eq!(interval(Duration::from_secs(3_600)), INTERVAL_MAX);
        assert_eq!(interval(Duration::from_millis(1)), INTERVAL_MIN);
    }

    #[test]
    fn a_switch_names_the_service_and_its_new_primary() {
        let push = |text: &str| PushInfo {
            kind: PushKind::Message,
            data: [SWITCHES, text]
                .map(|text| Value::BulkString(text.as_bytes().to_vec()))
                .into(),
        };
        let told = read_switch(push("orders 10.0.0.1 6379 ::2 6380"), "orders");
        assert_eq!(told, Some(("::2".to_owned(), 6380)));
        for text in [
            "others 10.0.0.1 6379 10.0.0.2 6379",
            "orders 10.0.0.1 6379 10.0.0.2",
            "orders 10.0.0.1 6379 10.0.0.2 port",
            "",
        ] {
            assert_eq!(read_switch(push(text), "orders"), None, "{text}");
        }
    }
}
