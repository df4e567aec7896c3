//! `rlock exporter`: the fields of `INFO rlock` of every node, for Prometheus.

mod metrics;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use redis::cmd;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::connect::Connection;
use crate::exit::{Failure, warn};
use crate::exporter::metrics::{Scrape, page};
use crate::server::{Found, Node, all_of};

/// Finding the nodes may take this long, and asking all of them at once this long again. Together
/// that is less than the 10 s that Prometheus waits: a timeout there would hide every node.
const PATIENCE: Duration = Duration::from_secs(4);

/// This many connections are served at once; the next ones wait to be accepted. Each costs a
/// connection to every node.
const SERVED_MAX: usize = 32;

/// A client has to send its request within this time.
const ASKED: Duration = Duration::from_secs(2);

/// And to read the answer within this time, which is longer than asking the nodes takes.
const SERVED: Duration = Duration::from_secs(20);

/// Serves until it is told to end.
pub(crate) fn serve(listen: SocketAddr, connection: &Connection) -> Result<u8, Failure> {
    // It is seen at once, and not at the first scrape.
    if connection.names_each_node() {
        connection.infos_of_each()?;
    } else {
        connection.infos()?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::unavailable(format!("no runtime: {error}")))?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, accept(listen, connection))
}

async fn accept(listen: SocketAddr, connection: &Connection) -> Result<u8, Failure> {
    let cannot = |error| Failure::unavailable(format!("cannot listen on {listen}: {error}"));
    let listener = TcpListener::bind(listen).await.map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    // As process 1 of a container it is ended only by signals that it handles.
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;
    warn(format!("metrics are at http://{address}/metrics"));
    tokio::select! {
        () = serve_all(&listener, connection) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(0)
}

async fn serve_all(listener: &TcpListener, connection: &Connection) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= SERVED_MAX {
            connections.join_next().await;
        }
        let Ok((stream, _)) = listener.accept().await else {
            // No descriptors are left, perhaps: the next one may find some.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let connection = connection.clone();
        connections.spawn_local(async move {
            let service = service_fn(|request| answer(request, &connection));
            let mut server = http1::Builder::new();
            // One answer a connection: a client that keeps its connection open takes no place.
            server
                .timer(TokioTimer::new())
                .header_read_timeout(ASKED)
                .keep_alive(false);
            // A scraper that hangs up is no news, and neither is one that was too slow.
            let _ = timeout(
                SERVED,
                server.serve_connection(TokioIo::new(stream), service),
            )
            .await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    connection: &Connection,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    let (status, text) = match request.uri().path() {
        _ if !is_read => (StatusCode::METHOD_NOT_ALLOWED, String::new()),
        "/metrics" => (StatusCode::OK, page(&scrape(connection).await)),
        "/" => (StatusCode::OK, "rlock exporter: see /metrics\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "see /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

/// Asks every node. A node that does not answer is down.
async fn scrape(connection: &Connection) -> Vec<Scrape> {
    let found = async {
        if connection.names_each_node() {
            Found::each(connection).await
        } else {
            Found::connect(connection).await
        }
    };
    let found = timeout(PATIENCE, found).await;
    let Ok(Ok(found)) = found else {
        return connection.places().into_iter().map(Scrape::down).collect();
    };
    let scrapes = all_of(found.nodes.into_iter().map(ask)).await;
    let down = found.unreachable.into_iter().map(Scrape::down);
    scrapes.into_iter().flatten().chain(down).collect()
}

async fn ask(node: Node) -> Scrape {
    let info = timeout(PATIENCE, node.ask(cmd("INFO").arg("rlock"))).await;
    let address = node.address;
    match info {
        Ok(Ok(info)) => Scrape::of(address, info.as_str().unwrap_or_default()),
        _ => Scrape::down(address),
    }
}
