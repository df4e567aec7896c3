//! A connection to a primary.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::wire::Socket;

/// The server's address, as the newest successful question found it. `None` if that server cannot
/// be reached.
#[derive(Clone, Debug, Default)]
pub(super) struct Latest {
    pub(super) found: Option<Arc<str>>,
    pub(super) asked: Option<Instant>,
}

impl Latest {
    pub(super) fn is(&self, address: &str) -> bool {
        self.found.as_deref() == Some(address)
    }
}

/// A connection to a primary. Dropping it closes the socket.
pub(crate) struct Connection {
    pub(super) socket: Socket,
    /// The server's push messages: there are none, but they end with the connection.
    pub(super) pushes: mpsc::UnboundedReceiver<redis::PushInfo>,
    /// Where it leads.
    pub(super) address: Arc<str>,
    pub(super) latest: watch::Receiver<Latest>,
}

impl Connection {
    /// Ends when the peer is known to have closed it, or another server has been found, by another
    /// connection or by the word of the sentinels.
    pub(crate) async fn over(&mut self) {
        let is_other = |latest: &Latest| !latest.is(&self.address);
        tokio::select! {
            _ = self.latest.wait_for(is_other) => {}
            () = async { while self.pushes.recv().await.is_some() {} } => {}
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use redis::{Cmd, Value};
    use tokio::time::timeout;

    use super::*;
    use crate::wire::{Connector, Dialer};
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(10);

    /// Answers by `answer`, but the first commands of a connection as a primary does, until `QUIT`
    /// or the end of the connection. Returns the commands.
    pub(crate) async fn serve(
        socket: TcpStream,
        answer: impl Fn(&[String]) -> String,
    ) -> Vec<String> {
        let mut socket = BufReader::new(socket);
        let mut asked = Vec::new();
        let mut line = String::new();
        while asked.last().is_none_or(|last| last != "QUIT") {
            let mut words = Vec::new();
            line.clear();
            if socket.read_line(&mut line).await.unwrap_or_default() == 0 {
                break;
            }
            let count: usize = line.trim_start_matches('*').trim().parse().expect("words");
            for _ in 0..count {
                line.clear();
                socket.read_line(&mut line).await.expect("a length");
                let length: usize = line.trim_start_matches('$').trim().parse().expect("one");
                let mut word = vec![0; length.saturating_add(2)];
                socket.read_exact(&mut word).await.expect("a word");
                words.push(String::from_utf8_lossy(&word).trim().to_owned());
            }
            let reply = match words[0].as_str() {
                "HELLO" => "%1\r\n$4\r\nrole\r\n$6\r\nmaster\r\n".to_owned(),
                "CLIENT" | "ASKING" | "QUIT" => "+OK\r\n".to_owned(),
                _ => answer(&words),
            };
            socket.write_all(reply.as_bytes()).await.expect("it reads");
            asked.push(words.join(" "));
        }
        asked
    }

    fn command(words: &str) -> Arc<Cmd> {
        let mut cmd = Cmd::new();
        Arc::new(cmd.arg(words.split(' ').collect::<Vec<_>>()).take())
    }

    #[tokio::test]
    async fn an_asking_goes_before_its_command_and_what_it_is_answered_is_told_to_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("redis://{}", listener.local_addr().expect("a port"));
        let server = tokio::spawn(async move {
            let (socket, _) = listener.accept().await.expect("it connects");
            serve(socket, |words| format!(":{}\r\n", words[1])).await
        });
        let connector = Connector::new(&url, &[], &Dialer::within(LIMIT));
        let mut connection = connector.expect("a URL").open().await.expect("a primary");
        let mut spare = None;
        for asking in [true, false] {
            let all = [false, true, true, false, asking];
            let send = |(number, asking): (i64, bool)| {
                let echo = command(&format!("ECHO {number}"));
                connection.socket.send(&echo, asking, spare.take())
            };
            let replies: Vec<_> = (0..).zip(all).map(send).collect();
            for (number, mut reply) in (0..).zip(replies) {
                let told = timeout(LIMIT, &mut reply).await.expect("in time");
                assert_eq!(told.expect("a reply"), Value::Int(number));
                spare = Some(reply);
            }
        }
        let quit = connection.socket.ask(Cmd::new().arg("QUIT").take(), LIMIT);
        assert_eq!(quit.await.expect("a reply"), Value::Okay);
        let asked = server.await.expect("it ends");
        let asked: Vec<_> = asked.iter().map(String::as_str).collect();
        let asked = asked
            .rsplit(|words| words.starts_with("HELLO") || words.starts_with("CLIENT"))
            .next();
        let expected = "ECHO 0, ASKING, ECHO 1, ASKING, ECHO 2, ECHO 3, ASKING, ECHO 4, \
            ECHO 0, ASKING, ECHO 1, ASKING, ECHO 2, ECHO 3, ECHO 4, QUIT";
        assert_eq!(asked.expect("commands").join(", "), expected);
        timeout(LIMIT, connection.over())
            .await
            .expect("it is known to be closed");
    }
}
