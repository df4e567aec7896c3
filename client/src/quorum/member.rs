//! One of the servers of a quorum, and its client as soon as there is one.

use std::sync::Arc;

use redis::IntoConnectionInfo;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::api::Client;
use crate::api::ClientBuilder;
use crate::backoff::Backoff;
use crate::error::Error;

/// One server.
pub(crate) struct Member {
    pub(crate) address: Arc<str>,
    url: Box<str>,
    link: watch::Sender<Link>,
}

/// Whether it has ever been reached. From then on its client connects again by itself.
enum Link {
    New,
    Failed(Error),
    Made(Client),
}

impl Member {
    /// Reads the URL; no I/O.
    pub(crate) fn new(url: &str) -> Result<Arc<Self>, Error> {
        let info = url
            .into_connection_info()
            .map_err(Error::could_not_connect)?;
        Ok(Arc::new(Self {
            address: info.addr().to_string().into(),
            url: url.into(),
            link: watch::Sender::new(Link::New),
        }))
    }

    /// Connects; if that fails, again and again.
    pub(crate) async fn connect(self: Arc<Self>, settings: ClientBuilder) {
        let mut backoff = Backoff::new();
        loop {
            match settings.clone().connect(&self.url).await {
                Ok(client) => {
                    self.link.send_replace(Link::Made(client));
                    return;
                }
                Err(error) => self.link.send_replace(Link::Failed(error)),
            };
            sleep(backoff.next()).await;
        }
    }

    /// Waits until the first try to connect has ended: the error, if it failed.
    pub(crate) async fn tried(self: Arc<Self>) -> Option<Error> {
        let mut link = self.link.subscribe();
        // The sender is `self`: there is no other end to this.
        let _ = link.wait_for(|link| !matches!(link, Link::New)).await;
        self.reached().err()
    }

    /// The client, if the server has ever been reached.
    pub(crate) fn reached(&self) -> Result<Client, Error> {
        match &*self.link.borrow() {
            Link::Made(client) => Ok(client.clone()),
            Link::Failed(error) => Err(error.clone()),
            Link::New => Err(Error::not_attached()),
        }
    }

    /// The client, if its connection is not known to be broken: whoever asks many servers does not
    /// wait for one that is down.
    pub(crate) fn client(&self) -> Result<Client, Error> {
        let client = self.reached()?;
        client.trouble().map_or(Ok(client), Err)
    }
}
