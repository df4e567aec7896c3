//! The task that asks the sentinels again and again whether the server in use is still the primary.
//!
//! A primary that is cut off from sentinels and replicas, but not from us, does not know that it
//! has been replaced. It goes on renewing locks that other clients may hold at the new primary by
//! then.

use std::time::Duration;

use redis::{PushInfo, PushKind};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::backoff::{Backoff, Pace, part_of};
use crate::chance::random;
use crate::wire::session::part_of_grace;
use crate::wire::{Address, Connector};
use crate::{Error, part};

/// Asks until it is aborted, with the node. The promises rest on this asking alone; listening to
/// one sentinel only makes it quicker.
pub(crate) async fn run(connector: Connector, grace: Duration) {
    let (told, switches) = watch::channel(Address::default());
    tokio::join!(
        ask_again(&connector, interval(grace), switches),
        listen(&connector, told),
    );
}

async fn ask_again(connector: &Connector, every: Duration, mut switches: watch::Receiver<Address>) {
    let mut began = Instant::now();
    loop {
        // Without this pause, a sentinel that reports switches without end would make us ask
        // without end.
        sleep(PAUSE_MIN).await;
        // Counted from the start of the last question: silent sentinels do not put off the next.
        let next = began.checked_add(pause(every)).unwrap_or(began);
        tokio::select! {
            () = sleep_until(next) => {}
            // Disabled when no sentinel lets us listen.
            Ok(()) = switches.changed() => {
                let address = switches.borrow_and_update().clone();
                follow(connector, &address, every).await;
            }
        }
        began = Instant::now();
        connector.ask_sentinels(part(every, ANSWER_PART)).await;
    }
}

/// Acts on one sentinel's message that the server at this address is the primary now. It needs a
/// majority, and the other sentinels usually agree in a moment. If that takes longer, the regular
/// questions go on.
async fn follow(connector: &Connector, address: &Address, interval: Duration) {
    let within = part(interval, ANSWER_PART);
    let mut backoff = Backoff::new();
    for _ in 0..FOLLOWED {
        if connector.is_at(address) || connector.ask_sentinels(within).await {
            return;
        }
        sleep(backoff.next_up_to(part(interval, 2))).await;
    }
}

/// Listens to one sentinel at a time, and tells the addresses of new primaries. One that does not
/// let us listen is not asked to again.
async fn listen(connector: &Connector, told: watch::Sender<Address>) {
    let mut sentinels: Vec<_> = connector.sentinels.clients().collect();
    let mut pace = Pace::default();
    sentinels.sort_by_cached_key(|_| random());
    while let Some(sentinel) = sentinels.first() {
        pace.keep(Duration::MAX).await;
        let heard = listen_to(sentinel, connector, &told).await;
        sentinels.rotate_left(1);
        if heard.is_err_and(|error| error.is_refused()) {
            sentinels.pop();
        }
    }
}

/// Listens until the connection is closed; or why the sentinel did not let us.
async fn listen_to(
    sentinel: &redis::Client,
    connector: &Connector,
    told: &watch::Sender<Address>,
) -> Result<(), Error> {
    let (within, service) = (connector.dialer.response_timeout, connector.address().host);
    let (mut connection, mut pushes) = connector.dialer.open(sentinel, Some(within)).await?;
    let subscribed = timeout(within, connection.redis.subscribe(SWITCHES)).await;
    let subscribed = subscribed.map_err(|_| Error::too_slow(within))?;
    subscribed.map_err(Error::could_not_connect)?;
    while let Some(push) = pushes.recv().await {
        if let Some(new) = read_switch(push, &service) {
            // Only the latest is of interest, however many come.
            told.send_replace(new);
        }
    }
    Ok(())
}

/// The new primary of this service, in a message `<service> <old host> <port> <new host> <port>`.
fn read_switch(push: PushInfo, service: &str) -> Option<Address> {
    if push.kind != PushKind::Message {
        return None;
    }
    let text: String = redis::from_redis_value(push.data.into_iter().next_back()?).ok()?;
    let words: Vec<_> = text.split(' ').collect();
    let [name, _, _, host, port] = words[..] else {
        return None;
    };
    let (host, port) = (host.into(), port.parse().ok()?);
    (name == service).then_some(Address { host, port })
}

/// Within which time to ask at least once.
fn interval(grace: Duration) -> Duration {
    part_of_grace(grace, 1).clamp(INTERVAL_MIN, INTERVAL_MAX)
}

/// From one question to the next: from a half to three quarters of the interval, by chance, so that
/// clients do not ask all at once. The rest is for the answers, and to confirm the holds or lose
/// them.
fn pause(interval: Duration) -> Duration {
    part(interval, 2).saturating_add(part_of(part(interval, 4), random()))
}

/// The channel on which sentinels announce new primaries.
const SWITCHES: &str = "+switch-master";

/// The most questions whether a majority of the sentinels has heard of a new primary: they take one
/// to three seconds.
const FOLLOWED: u32 = 8;

/// The longest interval, for any grace and for none: it bounds how long a client stays with a
/// primary that was replaced.
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
        assert_eq!(
            told,
            Some(Address {
                host: "::2".into(),
                port: 6380
            })
        );
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
