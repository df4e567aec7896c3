//! The client's metrics, in a process of its own: each process has one meter provider.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use opentelemetry_sdk::metrics::data::{AggregatedMetrics, HistogramDataPoint, MetricData};
use opentelemetry_sdk::metrics::{InMemoryMetricExporter, PeriodicReader, SdkMeterProvider};
use rlock_client::{Client, Error};
use tokio::time::sleep;

const SECOND: Duration = Duration::from_secs(1);

/// The last measurements: of a histogram the count and the sum in whole seconds, of a counter the
/// number by attribute.
fn measured(exporter: &InMemoryMetricExporter) -> BTreeMap<String, (u64, u64)> {
    let mut all = BTreeMap::new();
    let resource = exporter.get_finished_metrics().unwrap().pop().unwrap();
    for scope in resource.scope_metrics() {
        for metric in scope.metrics() {
            match metric.data() {
                AggregatedMetrics::F64(MetricData::Histogram(of)) => {
                    assert_eq!(metric.unit(), "s");
                    let seconds: f64 = of.data_points().map(HistogramDataPoint::sum).sum();
                    let count = of.data_points().map(HistogramDataPoint::count).sum();
                    let seconds = Duration::from_secs_f64(seconds).as_secs();
                    all.insert(metric.name().to_owned(), (count, seconds));
                }
                AggregatedMetrics::U64(MetricData::Sum(of)) => {
                    for point in of.data_points() {
                        let by: Vec<_> = point.attributes().map(|of| of.value.as_str()).collect();
                        let name = format!("{} {}", metric.name(), by.join(" "));
                        all.insert(name.trim_end().to_owned(), (point.value(), 0));
                    }
                }
                other => panic!("{} is {other:?}", metric.name()),
            }
        }
    }
    all
}

#[test]
fn waits_holds_losses_renewals_and_reconnects_are_measured() -> Result<(), Error> {
    let exporter = InMemoryMetricExporter::default();
    let reader = PeriodicReader::builder(exporter.clone()).build();
    let provider = SdkMeterProvider::builder().with_reader(reader).build();
    opentelemetry::global::set_meter_provider(provider.clone());
    rlock_test::run(1, async |network| {
        let server = network.server("locks:6379");
        let host = network.host();
        let builder = Client::builder().dial(host.dial()).grace(5 * SECOND);
        let client = builder.connect("redis://locks:6379").await?;
        // Renewed twice. The other call waits for as long.
        let guard = client.lock("k").lock().await?;
        let second = client.lock("k");
        let second = tokio::spawn(async move { second.lock().await });
        sleep(25 * SECOND).await;
        // A call that does not wait is no wait.
        let tried = client.lock("k").try_lock().await;
        assert!(tried.is_err_and(|error| error.is_not_acquired()));
        guard.unlock().await?;
        let guard = second.await.unwrap()?;
        host.reset("locks:6379");
        sleep(SECOND).await;
        server.delete("k");
        guard.lost().await;
        drop(guard);
        // Of a lock that is kept one call waits for the other, and the server has one hold.
        let kept = client.lock("kept").keep(SECOND);
        let guard = kept.lock().await?;
        let second = kept.clone();
        let second = tokio::spawn(async move { second.lock().await });
        sleep(4 * SECOND).await;
        guard.unlock().await?;
        second.await.unwrap()?.unlock().await?;
        sleep(2 * SECOND).await;
        // Its time is over, and nobody has looked or heard of it.
        let own = client.lock("own").lease(10 * SECOND).lock().await?;
        sleep(Duration::from_millis(9_950)).await;
        assert!(own.unlock().await.is_err_and(|error| error.is_lost()));
        client.shutdown().await;
        Ok::<_, Error>(())
    })?;
    provider.force_flush().unwrap();
    let measured = measured(&exporter);
    let expected = [
        ("rlock.client.wait.duration", (5, 29)),
        ("rlock.client.hold.duration", (4, 41)),
        ("rlock.client.lost Deleted", (1, 0)),
        ("rlock.client.lost Expired", (1, 0)),
        // Two of the lock that is waited for, and one of the lock that is kept.
        ("rlock.client.renewals held", (3, 0)),
        ("rlock.client.reconnects", (1, 0)),
    ];
    let expected = expected.map(|(name, figures)| (name.to_owned(), figures));
    assert_eq!(measured, BTreeMap::from(expected));
    Ok(())
}
