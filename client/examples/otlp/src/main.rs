//! The client's metrics, sent to an OpenTelemetry collector by OTLP: a worker that takes a lock
//! again and again, and whose waits and losses show on a dashboard.
//!
//! ```console
//! $ OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318 cargo run -p rlock-example-otlp -- \
//!       redis://127.0.0.1:6379 100
//! ```

#![allow(clippy::print_stderr, reason = "a program for a terminal")]

use std::error::Error;
use std::time::Duration;

use opentelemetry_otlp::MetricExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::metrics::SdkMeterProvider;
use rlock_client::Client;
use tokio::time::sleep;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or("redis://127.0.0.1:6379".into());
    let rounds: u32 = arguments.next().unwrap_or("100".into()).parse()?;

    // Before the first client: all metrics go to the provider that is set at the first measurement.
    let exporter = MetricExporter::builder().with_http().build()?;
    let provider = SdkMeterProvider::builder()
        .with_periodic_exporter(exporter)
        .with_resource(Resource::builder().with_service_name("stock").build())
        .build();
    opentelemetry::global::set_meter_provider(provider.clone());

    let client = Client::builder().label("stock").connect(&url).await?;
    for _ in 0..rounds {
        let guard = client.lock("stock:42").lock().await?;
        sleep(Duration::from_millis(10)).await;
        guard.unlock().await?;
    }
    client.shutdown().await;
    // It sends the remaining metrics, and waits for that.
    tokio::task::spawn_blocking(move || provider.shutdown()).await??;
    eprintln!("took the lock {rounds} times");
    Ok(())
}
