//! Part 9: other servers: uncontended locks on each that `scripts/servers` could get, and on the
//! same with threads for its sockets.

use std::env;

use rlock_tests::Server;

use crate::host::Host;
use crate::load::{Load, Pace};
use crate::numbers::{Spread, figure};
use crate::plot::{Bars, Group};
use crate::report::Report;
use crate::results::{Results, at};
use crate::rounds::{Run, alternate};
use crate::uncontended::{COMPARE, NATIVE, RLOCK, SET_DEL, contenders};

pub(crate) const PART: &str = "servers";

/// The programs, with a colon between them: `scripts/bench` names them.
const PROGRAMS: &str = "RLOCK_BENCH_SERVERS";
const IO_THREADS: usize = 2;
const PIPELINES: [usize; 2] = [1, 16];
const ALL: [&str; 4] = [RLOCK, SET_DEL, COMPARE, NATIVE];

pub(crate) fn measure(run: &Run) -> Results {
    let mut results = Results::new(PART, &Pace::MEASURES);
    let mut hosts = hosts(run);
    for pipeline in PIPELINES {
        let mut loads: Vec<(usize, &str, Load)> = Vec::new();
        for (place, (_, host)) in hosts.iter().enumerate() {
            let all = contenders(&host.server).into_iter();
            for one in all.filter(|one| ALL.contains(&one.name)) {
                loads.push((place, one.name, one.load(&host.server, pipeline)));
            }
        }
        for (place, _, load) in &mut loads {
            load.round(&mut hosts[*place].1, run.length(50));
        }
        alternate(loads.len(), run.rounds(7), |index, round| {
            let (place, contender, load) = &mut loads[index];
            let (name, host) = &mut hosts[*place];
            let counted = load.round(host, run.length(300));
            results.add(&at(name, pipeline), contender, round, &counted.values());
        });
    }
    results
}

/// The server of the other parts, and each of the others twice.
fn hosts(run: &Run) -> Vec<(String, Host)> {
    let host = run.host();
    let mut hosts = vec![(host.name(), host)];
    let programs = env::var(PROGRAMS).unwrap_or_default();
    for program in programs.split(':').filter(|program| !program.is_empty()) {
        let how = Server::builder().program(program);
        let host = run.host_of(how.clone());
        let threads = how.config(&format!("io-threads {IO_THREADS}"));
        let threaded = Host::of(run.cores.start_on_both(threads));
        let name = host.name();
        hosts.push((name.clone(), host));
        hosts.push((format!("{name} with io-threads {IO_THREADS}"), threaded));
    }
    if hosts.len() == 1 {
        println!("{PART}: no other server is at hand");
    }
    hosts
}

pub(crate) fn report(results: &Results) -> Report {
    let mut report = Report::titled("9. Other servers");
    report.says(
        "As in part 1. Servers with io-threads have both cores, and so share one with the load: \
         on a machine with more cores they do more. Pairs a second with RLOCK; against the first \
         server; and against plain commands, a script, and the command of newer servers \
         that deletes a key if it has a value, on the same server.",
    );
    let servers = results.cases();
    for pipeline in PIPELINES {
        let rows: Vec<_> = servers
            .iter()
            .map(|server| {
                let (here, first) = (at(server, pipeline), at(&servers[0], pipeline));
                let against = |other| results.ratio(&here, "per_second", RLOCK, other).to_string();
                let speed = |at| results.values(at, RLOCK, "per_second");
                vec![
                    server.clone(),
                    figure(results.median(&here, RLOCK, "per_second")),
                    Spread::of_ratios(&speed(&here), &speed(&first)).to_string(),
                    against(SET_DEL),
                    against(COMPARE),
                    against(NATIVE),
                ]
            })
            .collect();
        report.table(
            &[
                &format!("pipeline {pipeline}"),
                "pairs/s",
                "against the first",
                SET_DEL,
                "compare-and-delete",
                "DELEX or DELIFEQ",
            ],
            &rows,
        );
    }
    if servers.len() == 1 {
        report.says("Other servers were skipped: none could be had on this machine.");
    }
    report
}

pub(crate) fn plots(results: &Results) -> Vec<(&'static str, String)> {
    let groups = results.cases().into_iter().map(|name| {
        let at = at(&name, PIPELINES[1]);
        let bar = |way: &str| {
            let speed = results.spread(&at, way, "per_second");
            (way.to_owned(), speed)
        };
        let bars = results.contenders(&at).iter().map(|way| bar(way)).collect();
        let name = name.replace(" with io-threads", " threads");
        Group { name, bars }
    });
    let plot = Bars {
        title: "Servers: take and give back, pipeline 16",
        unit: "thousand pairs per second",
        scale: 1e-3,
        groups: groups.collect(),
    };
    vec![("servers", plot.draw())]
}
