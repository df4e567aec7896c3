//! Asking sentinels where the primary of a service is.

use std::collections::HashMap;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::error::Error;
use crate::time::part;

/// The host and port of a primary.
type Address = (String, u16);

/// Asks all of them at once. What more than half of them say is taken at once: a dead sentinel then
/// costs no time, and one that is cut off from the others does not lead to a primary that they have
/// replaced. Without such a majority it is what most of those say who answer soon.
pub(crate) async fn primary(
    sentinels: &[redis::Client],
    service: &str,
    within: Duration,
) -> Result<Address, Error> {
    let mut asked = JoinSet::new();
    for sentinel in sentinels {
        asked.spawn(ask(sentinel.clone(), service.to_owned(), within));
    }
    let mut named: HashMap<Address, usize> = HashMap::new();
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
                let count = named.entry(address.clone()).or_default();
                *count = count.saturating_add(1);
                if *count > sentinels.len() / 2 {
                    return Ok(address);
                }
            }
            Err(error) => errors.push(error),
        }
    }
    let most = named.into_iter().max_by_key(|(_, count)| *count);
    most.map(|(address, _)| address)
        .ok_or_else(|| Error::no_sentinel(&errors))
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
