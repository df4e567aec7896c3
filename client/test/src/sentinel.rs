//! Sentinels in memory: they tell where a service has its primary.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use redis_protocol::resp3::types::BytesFrame as Frame;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_local;
use tokio_util::codec::Framed;
use tokio_util::sync::CancellationToken;

use crate::commands::{array, blob, error, number, simple};
use crate::life::while_alive;
use crate::resp::Resp;
use crate::wire::End;

/// A sentinel in memory. Clones are the same one.
///
/// It answers `SENTINEL GET-MASTER-ADDR-BY-NAME`, and tells the subscribers of `+switch-master` of
/// a new primary. It decides nothing: the test sets the primary that it names.
#[derive(Clone, Debug)]
pub struct Sentinel {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    service: String,
    /// Where it says that the primary is.
    primary: RefCell<String>,
    running: watch::Sender<bool>,
    /// Whether it lets clients subscribe.
    lets_subscribe: Cell<bool>,
    /// Cancelled when it dies; none while it is dead.
    life: RefCell<Option<CancellationToken>>,
    subscribers: RefCell<Vec<mpsc::UnboundedSender<Frame>>>,
}

impl Sentinel {
    pub(crate) fn start(service: &str) -> Self {
        let inner = Inner {
            service: service.to_owned(),
            primary: RefCell::default(),
            running: watch::Sender::new(true),
            lets_subscribe: Cell::new(true),
            life: RefCell::new(Some(CancellationToken::new())),
            subscribers: RefCell::default(),
        };
        Self {
            inner: Rc::new(inner),
        }
    }

    /// It takes the server at this address, `host:port`, for the primary from now on, and says so.
    /// Before the first call it knows none.
    pub fn set_primary(&self, address: &str) {
        let before = self.inner.primary.replace(address.to_owned());
        if before.is_empty() || before == address {
            return;
        }
        let (old_host, old_port) = split(&before);
        let (host, port) = split(address);
        let service = &self.inner.service;
        let text = format!("{service} {old_host} {old_port} {host} {port}");
        let message = push(vec![blob("message"), blob(SWITCHES), blob(text)]);
        let mut subscribers = self.inner.subscribers.borrow_mut();
        subscribers.retain(|subscriber| subscriber.send(message.clone()).is_ok());
    }

    /// Where it says that the primary is.
    pub fn primary(&self) -> String {
        self.inner.primary.borrow().clone()
    }

    /// Its user may not subscribe: clients hear of a new primary when they ask.
    pub fn refuse_subscribers(&self) {
        self.inner.lets_subscribe.set(false);
        self.inner.subscribers.take();
    }

    /// It stands still: it answers nothing.
    pub fn pause(&self) {
        self.inner.running.send_replace(false);
    }

    /// It goes on.
    pub fn resume(&self) {
        self.inner.running.send_replace(true);
    }

    /// Whether it does not stand still.
    pub fn is_running(&self) -> bool {
        *self.inner.running.borrow() && self.is_up()
    }

    /// The process dies, and all its connections with it.
    pub fn crash(&self) {
        if let Some(life) = self.inner.life.take() {
            life.cancel();
        }
        self.inner.subscribers.take();
    }

    /// Starts it again after a [`crash`](Self::crash), with the primary that it named before.
    pub fn restart(&self) {
        let mut life = self.inner.life.borrow_mut();
        life.get_or_insert_default();
        self.inner.running.send_replace(true);
    }

    pub(crate) fn is_up(&self) -> bool {
        self.inner.life.borrow().is_some()
    }

    /// Serves a connection until it closes or this life ends.
    pub(crate) fn accept(&self, stream: End) {
        let Some(life) = self.inner.life.borrow().clone() else {
            return;
        };
        let inner = Rc::clone(&self.inner);
        spawn_local(async move {
            while_alive(&life, inner.serve(stream)).await;
        });
    }
}

impl Inner {
    async fn serve(&self, stream: End) {
        let mut stream = Framed::new(stream, Resp::default());
        let (subscriber, mut messages) = mpsc::unbounded_channel();
        loop {
            let replies = tokio::select! {
                biased;
                Some(message) = messages.recv() => vec![message],
                command = stream.next() => {
                    let Some(Ok(args)) = command else { return };
                    self.is_running().await;
                    self.call(&args, &subscriber)
                }
            };
            self.is_running().await;
            for reply in replies {
                if stream.send(reply).await.is_err() {
                    return;
                }
            }
        }
    }

    async fn is_running(&self) {
        let mut running = self.running.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = running.wait_for(|running| *running).await;
    }

    fn call(&self, args: &[Bytes], subscriber: &mpsc::UnboundedSender<Frame>) -> Vec<Frame> {
        let words: Vec<_> = args
            .iter()
            .map(|arg| String::from_utf8_lossy(arg).into_owned())
            .collect();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let is = |word: &str, name: &str| word.eq_ignore_ascii_case(name);
        let reply = match words[..] {
            [name, ..] if is(name, "HELLO") => hello(),
            [name, ..] if is(name, "PING") => simple("PONG"),
            [name, ..] if is(name, "CLIENT") => simple("OK"),
            [name, verb, service]
                if is(name, "SENTINEL") && is(verb, "GET-MASTER-ADDR-BY-NAME") =>
            {
                self.address_of(service)
            }
            [name, ..] if is(name, "SUBSCRIBE") && !self.lets_subscribe.get() => {
                error("NOPERM User default has no permissions to run the 'subscribe' command")
            }
            [name, ref channels @ ..] if is(name, "SUBSCRIBE") && !channels.is_empty() => {
                if channels.contains(&SWITCHES) {
                    self.subscribers.borrow_mut().push(subscriber.clone());
                }
                let replies = (1..).zip(channels).map(|(count, channel)| {
                    let channel = Bytes::copy_from_slice(channel.as_bytes());
                    push(vec![blob("subscribe"), blob(channel), number(count)])
                });
                return replies.collect();
            }
            _ => error(&format!(
                "ERR unknown command '{}' in a sentinel in memory",
                words.join(" ")
            )),
        };
        vec![reply]
    }

    fn address_of(&self, service: &str) -> Frame {
        let primary = self.primary.borrow();
        if service != self.service || primary.is_empty() {
            return Frame::Null;
        }
        let (host, port) = split(&primary);
        array(vec![blob(host.to_owned()), blob(port.to_owned())])
    }
}

fn hello() -> Frame {
    let pairs = [
        ("server", blob("redis")),
        ("version", blob("7.0.15")),
        ("proto", number(3)),
        ("mode", blob("sentinel")),
        ("modules", array(Vec::new())),
    ];
    Frame::Map {
        data: pairs.map(|(key, value)| (blob(key), value)).into(),
        attributes: None,
    }
}

fn push(data: Vec<Frame>) -> Frame {
    Frame::Push {
        data,
        attributes: None,
    }
}

fn split(address: &str) -> (&str, &str) {
    address.rsplit_once(':').unwrap_or((address, "6379"))
}

/// The channel on which sentinels tell of new primaries.
const SWITCHES: &str = "+switch-master";
