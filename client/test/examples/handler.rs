//! A web handler that works under a lock, and its tests without a Redis, a socket or a pause.
//!
//! `cargo test -p rlock-test --example handler` runs the tests; `cargo run -p rlock-test --example
//! handler` serves at port 3000 with the locks of `RLOCK_URL`: `curl -X POST
//! localhost:3000/orders/7`.

use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use rlock_client::Client;
use tokio::net::TcpListener;
use tokio::time::sleep;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("RLOCK_URL");
    let url = url.unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = Client::connect(&url).await?;
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app(client)).await?;
    Ok(())
}

fn app(client: Client) -> Router {
    let routes = Router::new().route("/orders/{order}", post(ship));
    routes.with_state(client)
}

/// Ships an order once, however many requests for it come, to however many processes.
async fn ship(State(client): State<Client>, Path(order): Path<String>) -> StatusCode {
    let guard = match client.lock(format!("order:{order}")).try_lock().await {
        Ok(guard) => guard,
        Err(error) if error.is_not_acquired() => return StatusCode::CONFLICT,
        Err(_) => return StatusCode::SERVICE_UNAVAILABLE,
    };
    let shipped = tokio::select! {
        biased;
        _ = guard.lost() => false, // stop: another process may ship it now
        () = pack() => guard.unlock().await.is_ok(),
    };
    if shipped {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    }
}

async fn pack() {
    sleep(Duration::from_secs(60)).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use tokio::time::Instant;
    use tower::ServiceExt as _;

    async fn status(app: &Router, order: u32) -> StatusCode {
        let request = Request::post(format!("/orders/{order}"));
        let request = request.body(Body::empty()).unwrap();
        app.clone().oneshot(request).await.unwrap().status()
    }

    #[tokio::test(start_paused = true)]
    async fn two_requests_for_one_order_ship_it_once() {
        rlock_test::with_server(async |_server, client| {
            let app = app(client);
            let begun = Instant::now();
            let both = tokio::join!(status(&app, 7), status(&app, 7));
            assert_eq!(both, (StatusCode::OK, StatusCode::CONFLICT));
            assert!(
                begun.elapsed() >= Duration::from_secs(60),
                "on the test's clock"
            );
            let two = tokio::join!(status(&app, 8), status(&app, 9));
            assert_eq!(two, (StatusCode::OK, StatusCode::OK));
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_whose_lock_is_lost_does_not_claim_success() {
        rlock_test::with_server(async |server, client| {
            let app = app(client);
            let breaks = async {
                sleep(Duration::from_secs(1)).await;
                server.break_lock("order:7");
            };
            let (answer, ()) = tokio::join!(status(&app, 7), breaks);
            assert_eq!(answer, StatusCode::SERVICE_UNAVAILABLE);
        })
        .await;
    }
}
