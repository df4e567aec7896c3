//! Asking sentinels where the primary of a service is.

use std::collections::HashMap;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::error::Error;
use crate::time::part;

/// The host and port of a primary.
pub(crate) type Address = (String, u16);

/// Where the primary is, by the word of sentinels.
pub(crate) struct Named {
    pub(crate) address: Address,
    /// Whether more than half of all that were asked say so.
    pub(crate) by_most: bool,
}

/// Asks all of them at once. What more than half of them say is taken at once: a dead sentinel then
/// costs no time, and one that is cut off from the others does not lead to a primary that they have
/// replaced. Without such a majority it is what most of those say who answer soon; but if one of
/// them names what a majority named `before`, it is that, so that changing answers do not lead to
/// and fro.
pub(crate) async fn primary(
    sentinels: &[redis::Client],
    service: &str,
    within: Duration,
    before: Option<&Address>,
) -> Result<Named, Error> {
    let mut asked = ask_all(sentinels, service, within);
    let mut votes = Votes::of(sentinels.len());
    let mut errors = Vec::new();
    // Each of them ends in time by itself; the first that knows something shortens the wait.
    let mut deadline = None;
    loop {
        let late = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let answer = tokio::select! {
            answer = asked.join_next() => answer,
            () = late => break,
        };
        let Some(answer) = answer else { break };
        match answer.unwrap_or_else(|_| Err(Error::no_runtime())) {
            Ok(address) => {
                deadline = deadline.or(Instant::now().checked_add(part(within, SOON)));
                if let Some(address) = votes.add(address) {
                    let by_most = true;
                    return Ok(Named { address, by_most });
                }
            }
            Err(error) => errors.push(error),
        }
    }
    let by_most = false;
    let best = votes.best(before);
    let best = best.map(|address| Named { address, by_most });
    best.ok_or_else(|| Error::no_sentinel(&errors))
}

/// What more than half of them say, however late each answers within this time.
pub(crate) async fn majority(
    sentinels: &[redis::Client],
    service: &str,
    within: Duration,
) -> Option<Address> {
    let mut asked = ask_all(sentinels, service, within);
    let mut votes = Votes::of(sentinels.len());
    while let Some(answer) = asked.join_next().await {
        if let Ok(Ok(address)) = answer
            && let Some(address) = votes.add(address)
        {
            return Some(address);
        }
    }
    None
}

/// What has been answered so far.
struct Votes {
    named: HashMap<Address, usize>,
    asked: usize,
}

impl Votes {
    fn of(asked: usize) -> Self {
        let named = HashMap::new();
        Self { named, asked }
    }

    /// One more answer: what it names, if more than half of all that were asked do.
    fn add(&mut self, address: Address) -> Option<Address> {
        let count = self.named.entry(address.clone()).or_default();
        *count = count.saturating_add(1);
        (*count > self.asked / 2).then_some(address)
    }

    /// What to believe without a majority.
    fn best(self, before: Option<&Address>) -> Option<Address> {
        let again = before.filter(|before| self.named.contains_key(*before));
        let most = self.named.iter().max_by_key(|(_, count)| **count);
        again.or(most.map(|(address, _)| address)).cloned()
    }
}

fn ask_all(
    sentinels: &[redis::Client],
    service: &str,
    within: Duration,
) -> JoinSet<Result<Address, Error>> {
    let mut asked = JoinSet::new();
    for sentinel in sentinels {
        asked.spawn(ask(sentinel.clone(), service.to_owned(), within));
    }
    asked
}

async fn ask(sentinel: redis::Client, service: String, within: Duration) -> Result<Address, Error> {
    let address = sentinel.get_connection_info().addr().to_string();
    let answer = timeout(within, address_of(&sentinel, &service)).await;
    let answer = answer.unwrap_or_else(|_| Err(Error::too_slow(within)));
    answer.map_err(|error| error.of(&format!("sentinel {address}")))
}

async fn address_of(sentinel: &redis::Client, service: &str) -> Result<Address, Error> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None);
    let connection = sentinel.get_multiplexed_async_connection_with_config(&config);
    let mut connection = connection.await.map_err(Error::could_not_connect)?;
    let mut question = redis::cmd("SENTINEL");
    question.arg("GET-MASTER-ADDR-BY-NAME").arg(service);
    let answer = connection.send_packed_command(&question).await;
    let answer = answer.map_err(Error::could_not_connect)?;
    match &answer {
        Value::ServerError(refusal) => Err(Error::from_server(refusal)),
        Value::Nil => Err(Error::unknown_service(service)),
        answer => read_address(answer).ok_or_else(Error::not_a_sentinel),
    }
}

fn read_address(answer: &Value) -> Option<Address> {
    let (host, port): (String, String) = redis::from_redis_value(answer.clone()).ok()?;
    Some((host, port.parse().ok()?))
}

/// The other sentinels may take this part of the time once one has answered.
const SOON: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_majority_it_is_what_a_majority_named_before_if_anybody_still_does() {
        let address = |port| ("host".to_owned(), port);
        let votes = |ports: &[u16]| {
            let mut votes = Votes::of(5);
            for port in ports {
                assert_eq!(votes.add(address(*port)), None);
            }
            votes
        };
        assert_eq!(votes(&[1, 2, 2]).best(None), Some(address(2)));
        assert_eq!(votes(&[1, 2, 2]).best(Some(&address(1))), Some(address(1)));
        assert_eq!(votes(&[1, 2, 2]).best(Some(&address(3))), Some(address(2)));
        assert_eq!(votes(&[]).best(Some(&address(1))), None);
        assert_eq!(votes(&[1, 2, 2]).add(address(2)), Some(address(2)));
    }

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let address = read_address(&Value::Array(vec![text("::1"), text("6379")]));
        assert_eq!(address, Some(("::1".to_owned(), 6379)));
        for answer in [
            Value::Array(vec![text("::1")]),
            Value::Array(vec![text("::1"), text("70000")]),
            text("::1"),
        ] {
            assert_eq!(read_address(&answer), None);
        }
    }
}
