//! One connection in memory: its two ends, and in each direction the bytes in flight and arrived.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep};

use crate::courier::Courier;
use crate::moments::{self, ConnectionId, Moment};
use crate::network::Direction;

/// One direction of a connection.
#[derive(Debug, Default)]
struct Way {
    /// The bytes in flight, in order, each with the time when it is due. An empty send is the end.
    in_flight: VecDeque<(Instant, Vec<u8>)>,
    arrived: BytesMut,
    /// The reader is told, after the bytes that have arrived, that the connection has ended.
    is_over: bool,
    /// Bytes that are sent are lost.
    is_lost: bool,
    cut: Cut,
    reader: Option<Waker>,
    /// How often something was sent or arrived, or it was cut, mended or ended.
    changes: u64,
}

/// Whether nothing gets through in one direction.
#[derive(Debug, Default)]
struct Cut {
    /// Of the whole link.
    link: bool,
    /// Of this connection alone.
    one: bool,
}

impl Way {
    /// The bytes that are due by now arrive, if the way is open.
    fn deliver(&mut self, now: Instant) {
        if self.cut.one || self.cut.link {
            return;
        }
        while self.in_flight.front().is_some_and(|(due, _)| *due <= now) {
            if let Some((_, bytes)) = self.in_flight.pop_front() {
                self.arrives(&bytes);
            }
        }
    }

    fn count_change(&mut self) {
        self.changes = self.changes.wrapping_add(1);
    }

    fn arrives(&mut self, bytes: &[u8]) {
        self.count_change();
        self.arrived.extend_from_slice(bytes);
        self.is_over |= bytes.is_empty();
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// Bytes in flight are lost, and so are bytes that are sent from now on.
    fn lose(&mut self, now: Instant) {
        self.count_change();
        self.deliver(now);
        self.in_flight.clear();
        self.is_lost = true;
    }

    fn end(&mut self) {
        self.count_change();
        self.is_over = true;
        self.wake();
    }

    fn cut_or_mend(&mut self, change: impl FnOnce(&mut Cut)) {
        self.count_change();
        self.deliver(Instant::now());
        change(&mut self.cut);
        self.deliver(Instant::now());
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) id: ConnectionId,
    ways: Mutex<Ways>,
}

#[derive(Debug, Default)]
struct Ways {
    to_server: Way,
    to_host: Way,
    /// It has ended for both ends.
    has_ended: bool,
    /// How many of its ends were closed.
    closed: u8,
}

impl Ways {
    fn of(&mut self, direction: Direction) -> &mut Way {
        match direction {
            Direction::ToServer => &mut self.to_server,
            Direction::ToHost => &mut self.to_host,
        }
    }
}

/// How long it takes until the end of a connection is heard.
const NEWS: Duration = Duration::from_millis(1);

/// It is heard after this many turns of all tasks: the other work of that moment comes first, in
/// whatever order the timers were set that began it. Even, since each turn reverses the order of
/// those who wait for the next.
const TURNS: u32 = 64;

impl Wire {
    pub(crate) fn of(id: ConnectionId) -> Self {
        let ways = Mutex::default();
        Self { id, ways }
    }

    /// How often the way to the server and that to the host were changed: bytes were sent or
    /// arrived, or it was cut, mended or ended.
    pub(crate) fn changes(&self) -> [u64; 2] {
        let ways = self.ways();
        [ways.to_server.changes, ways.to_host.changes]
    }

    fn ways(&self) -> MutexGuard<'_, Ways> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes that are due in this direction by now arrive.
    pub(crate) fn deliver(&self, direction: Direction, now: Instant) {
        self.ways().of(direction).deliver(now);
    }

    /// Whether an end of it is still open.
    pub(crate) fn is_open(&self) -> bool {
        let ways = self.ways();
        !ways.has_ended && ways.closed < 2
    }

    /// Cuts one direction of this connection.
    pub(crate) fn cut(&self, direction: Direction) {
        let mut ways = self.ways();
        ways.of(direction).cut_or_mend(|cut| cut.one = true);
    }

    /// The link is cut in this direction, or mended.
    pub(crate) fn set_link(&self, direction: Direction, is_cut: bool) {
        let mut ways = self.ways();
        ways.of(direction).cut_or_mend(|cut| cut.link = is_cut);
    }

    /// Mends both directions of this connection: the bytes in flight arrive.
    pub(crate) fn mend(&self) {
        let mut ways = self.ways();
        for direction in Direction::BOTH {
            ways.of(direction).cut_or_mend(|cut| cut.one = false);
        }
    }

    /// It ends: bytes in flight are lost, nothing can be sent any more, and both ends hear of it.
    pub(crate) fn end(self: &Arc<Self>) {
        self.lose();
        self.ways().has_ended = true;
        for direction in Direction::BOTH {
            self.tell(direction, NEWS);
        }
    }

    /// Bytes in flight and all that is sent are lost, and only the reader of this direction hears
    /// that it has ended.
    pub(crate) fn end_for(self: &Arc<Self>, direction: Direction) {
        self.lose();
        self.tell(direction, NEWS);
    }

    fn lose(&self) {
        let mut ways = self.ways();
        for direction in Direction::BOTH {
            ways.of(direction).lose(Instant::now());
        }
    }

    /// The reader of this direction hears after this time that the connection has ended, also if
    /// it is cut.
    pub(crate) fn tell(self: &Arc<Self>, direction: Direction, after: Duration) {
        let wire = Arc::clone(self);
        spawn_local(async move {
            sleep(after).await;
            for _ in 0..TURNS {
                yield_now().await;
            }
            wire.ways().of(direction).end();
        });
    }
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct End {
    wire: Arc<Wire>,
    /// The direction of the bytes that are written here.
    to: Direction,
    courier: Arc<Courier>,
}

/// The end of the host, and that of the server.
pub(crate) fn ends(wire: &Arc<Wire>, courier: &Arc<Courier>) -> (End, End) {
    let end = |to| End {
        wire: Arc::clone(wire),
        to,
        courier: Arc::clone(courier),
    };
    (end(Direction::ToServer), end(Direction::ToHost))
}

impl End {
    pub(crate) fn id(&self) -> ConnectionId {
        self.wire.id
    }

    /// Sends a message. A server tells by itself that it is about to.
    fn send_message(&self, bytes: &[u8]) -> io::Result<()> {
        if self.to == Direction::ToServer {
            moments::tell(Moment::Sends(self.to), self.id());
        }
        self.send(bytes)?;
        moments::tell(Moment::Sent(self.to), self.id());
        Ok(())
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut ways = self.wire.ways();
        let has_ended = ways.has_ended;
        let way = ways.of(self.to);
        way.count_change();
        if has_ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if way.is_lost {
            return Ok(());
        }
        let (now, delay) = (Instant::now(), self.courier.delay(self.id().host));
        let earliest = way.in_flight.back().map_or(now, |(due, _)| *due);
        let due = earliest.max(now.checked_add(delay).unwrap_or(now));
        way.in_flight.push_back((due, bytes.to_vec()));
        if due <= now {
            way.deliver(now);
        } else {
            self.courier.expect(due, &self.wire, self.to);
        }
        Ok(())
    }
}

impl AsyncRead for End {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut ways = self.wire.ways();
        let way = ways.of(self.to.back());
        let length = way.arrived.len().min(buffer.remaining());
        if length == 0 && !way.is_over {
            way.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        if length > 0 && self.to == Direction::ToServer {
            drop(ways);
            moments::tell(Moment::Reads, self.id());
            ways = self.wire.ways();
        }
        let way = ways.of(self.to.back());
        buffer.put_slice(way.arrived.get(..length).unwrap_or_default());
        way.arrived.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(match bytes.len() {
            0 => Ok(0),
            length => self.send_message(bytes).map(|()| length),
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.send(&[]))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // If it is broken, the other end knows.
        let _ = self.send(&[]);
        let mut ways = self.wire.ways();
        ways.closed = ways.closed.saturating_add(1);
        let back = ways.of(self.to.back());
        back.count_change();
        back.is_lost = true;
    }
}
