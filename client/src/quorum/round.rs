//! Several servers asked at once.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Questions that are under way, each to the server with this number. Dropping it drops them all.
pub(crate) struct Round<T> {
    asked: Vec<(usize, Asked<T>)>,
}

type Asked<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<T> Round<T> {
    pub(crate) fn new() -> Self {
        Self { asked: Vec::new() }
    }

    pub(crate) fn ask(
        &mut self,
        server: usize,
        question: impl Future<Output = T> + Send + 'static,
    ) {
        self.asked.push((server, Box::pin(question)));
    }

    /// How many have not answered yet.
    pub(crate) fn open(&self) -> usize {
        self.asked.len()
    }

    /// Whether this one has been asked and has not answered.
    pub(crate) fn waits_for(&self, server: usize) -> bool {
        self.asked.iter().any(|(asked, _)| *asked == server)
    }

    /// The next answer, `None` if there is none to come.
    ///
    /// Dropping the future loses nothing: an answer is taken out when it is returned.
    pub(crate) async fn next(&mut self) -> Option<(usize, T)> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, T)>> {
        let mut asked = self.asked.iter_mut().enumerate();
        let answered =
            asked.find_map(
                |(at, (server, question))| match question.as_mut().poll(cx) {
                    Poll::Ready(answer) => Some((at, *server, answer)),
                    Poll::Pending => None,
                },
            );
        match answered {
            Some((at, server, answer)) => {
                drop(self.asked.swap_remove(at));
                Poll::Ready(Some((server, answer)))
            }
            None if self.asked.is_empty() => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test]
    async fn answers_come_as_they_come_until_there_are_none_left() {
        let mut round = Round::new();
        let (tell, told) = tokio::sync::oneshot::channel();
        round.ask(0, async { told.await.expect("told") });
        round.ask(1, ready("at once"));
        assert_eq!((round.open(), round.waits_for(1)), (2, true));
        assert_eq!(round.next().await, Some((1, "at once")));
        assert!(!round.waits_for(1) && round.waits_for(0));
        tell.send("late").expect("it listens");
        assert_eq!(round.next().await, Some((0, "late")));
        assert_eq!(round.next().await, None);
    }

    #[tokio::test]
    async fn all_are_asked_before_any_is_waited_for() {
        let (asked, ask) = tokio::sync::oneshot::channel();
        let mut round = Round::new();
        round.ask(0, pending());
        round.ask(1, async { asked.send(()).expect("somebody listens") });
        assert_eq!(round.next().await, Some((1, ())));
        ask.await.expect("asked");
    }
}
