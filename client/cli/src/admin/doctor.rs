//! `rlock doctor`: the settings of a server that are unsafe for locks, and how to mend them.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use redis::{Cmd, RedisError, cmd};
use serde_json::{Value as Json, json};

use crate::args::Doctor;
use crate::exit::Failure;
use crate::reply::{say, say_json};
use crate::server::{Fleet, Node};

/// The options that it reads.
const OPTIONS: [&str; 8] = [
    "maxmemory",
    "maxmemory-policy",
    "appendonly",
    "appendfsync",
    "lazyfree-lazy-expire",
    "maxclients",
    "min-replicas-to-write",
    "rlock.grant-delay-ms",
];

/// The commands by which a primary replicates locks and writes them to its append-only file,
/// besides [`DELETIONS`].
const REPLICATED: [&str; 7] = [
    "HSET",
    "HDEL",
    "PEXPIREAT",
    "SET",
    "MULTI",
    "EXEC",
    "SELECT",
];

/// The module replicates the first that its server has. The server replicates an expired key by one
/// of them, as `lazyfree-lazy-expire` says.
const DELETIONS: [&str; 2] = ["DEL", "UNLINK"];

/// With it the module closes the connection that was bound before.
const CLOSES: &str = "CLIENT";

/// A primary replicates new locks by it, unless `rlock.replicate` is `plain`.
const RESTORES: &str = "RESTORE";

/// A fault of a server.
struct Finding {
    node: String,
    /// Its subject, one word for scripts.
    about: &'static str,
    what: String,
    /// The steps that mend it.
    advice: &'static str,
}

/// The answers of one server. A refusal is a finding; the checks that need that answer are skipped.
#[derive(Default)]
struct Examined {
    /// Of INFO.
    info: HashMap<String, String>,
    /// The version of the module; none if it is not loaded, or INFO is refused.
    module: Option<String>,
    /// Of CONFIG GET.
    config: HashMap<String, String>,
    /// Those of [`REPLICATED`], [`DELETIONS`], [`CLOSES`] and [`RESTORES`] that it does not have.
    lacks: Vec<&'static str>,
    /// Of ACL GETUSER default; null if it was not asked, or refused to tell.
    default_user: Json,
    /// The server's wall clock, ahead of this machine's, in milliseconds.
    clock: Option<i64>,
    /// The commands that it refused, each with the reason.
    refused: Vec<(&'static str, String)>,
}

pub(crate) async fn doctor(fleet: &Fleet, options: &Doctor) -> Result<u8, Failure> {
    let (mut findings, mut nodes, mut clocks) = (Vec::new(), Vec::new(), Vec::new());
    for node in fleet.nodes() {
        let examined = Examined::of(node)
            .await
            .map_err(|error| node.failure(&error))?;
        let found = examined.findings();
        nodes.push((node.address.clone(), examined.described()));
        clocks.extend(examined.clock);
        findings.extend(found.into_iter().map(|(about, what, advice)| Finding {
            node: node.address.clone(),
            about,
            what,
            advice,
        }));
    }
    findings.extend(without_primary(fleet.unserved));
    findings.extend(between(&clocks));
    if options.json {
        let nodes = nodes
            .iter()
            .map(|(node, what)| json!({ "node": node, "server": what }));
        let list = findings.iter().map(|one| {
            json!({
                "node": one.node, "about": one.about, "finding": one.what, "advice": one.advice,
            })
        });
        let (nodes, list): (Json, Json) = (nodes.collect(), list.collect());
        say_json(&json!({ "nodes": nodes, "findings": list }))?;
    } else {
        for (node, what) in &nodes {
            say(format!("{node}: {what}"))?;
        }
        for one in &findings {
            say("")?;
            say(format!("{}: {}", one.node, one.what))?;
            say(format!("  {}", one.advice))?;
        }
        if findings.is_empty() {
            say("nothing is unsafe for locks")?;
        }
    }
    Ok(u8::from(!findings.is_empty()))
}

/// Why a server does not answer. A server that has renamed the command calls it unknown.
fn refusal(node: &Node, error: &RedisError) -> String {
    let detail = error.detail().unwrap_or_default();
    if detail.starts_with("unknown command") {
        RENAMED.to_owned()
    } else {
        node.said(error)
    }
}

const RENAMED: &str = "it has no command of this name";

type Found = Vec<(&'static str, String, &'static str)>;

impl Examined {
    async fn of(node: &Node) -> Result<Self, RedisError> {
        let mut examined = Self::default();
        let told = examined.ask(node, "info", &cmd("INFO")).await?;
        examined.read_info(told.as_str().unwrap_or_default());
        let told = examined.ask(node, "info", cmd("INFO").arg("rlock")).await?;
        examined.read_info(told.as_str().unwrap_or_default());
        examined.ask_for_commands(node).await?;
        for option in OPTIONS {
            let told = cmd("CONFIG").arg("GET").arg(option).clone();
            let told = examined.ask(node, "config|get", &told).await?;
            if let Some(value) = told.get(option).and_then(Json::as_str) {
                let value = value.to_owned();
                examined.config.insert(option.to_owned(), value);
            }
        }
        if examined.has_aof() {
            let told = cmd("ACL").arg("GETUSER").arg("default").clone();
            examined.default_user = examined.ask(node, "acl|getuser", &told).await?;
        }
        let asked = Instant::now();
        let told = examined.ask(node, "time", &cmd("TIME")).await?;
        examined.clock = ahead(&told, asked.elapsed());
        Ok(examined)
    }

    /// The server's reply. If the server refuses to answer, it is null and the refusal is noted.
    /// That it cannot be asked is an error.
    async fn ask(
        &mut self,
        node: &Node,
        command: &'static str,
        words: &Cmd,
    ) -> Result<Json, RedisError> {
        match node.ask(words).await {
            Err(error) if error.code().is_some() => {
                if self.refused.iter().all(|(other, _)| *other != command) {
                    self.refused.push((command, refusal(node, &error)));
                }
                Ok(Json::Null)
            }
            told => told,
        }
    }

    async fn ask_for_commands(&mut self, node: &Node) -> Result<(), RedisError> {
        let names = || {
            let others = [CLOSES, RESTORES];
            REPLICATED.into_iter().chain(DELETIONS).chain(others)
        };
        let mut ask = cmd("COMMAND");
        ask.arg("INFO");
        for name in names() {
            ask.arg(name);
        }
        let told = self.ask(node, "command|info", &ask).await?;
        let told = told.as_array().map_or(&[][..], Vec::as_slice);
        let lacking = names().zip(told).filter(|(_, told)| told.is_null());
        self.lacks = lacking.map(|(name, _)| name).collect();
        Ok(())
    }

    fn lacks(&self, name: &str) -> bool {
        self.lacks.contains(&name)
    }

    fn is_replica(&self) -> bool {
        self.info("role") == "slave"
    }

    fn refuses(&self, command: &str) -> bool {
        self.refused.iter().any(|(refused, _)| *refused == command)
    }

    fn read_info(&mut self, told: &str) {
        for (field, value) in told.lines().filter_map(|line| line.split_once(':')) {
            // One such line for each module.
            if let Some(ours) = value
                .strip_prefix("name=rlock,ver=")
                .filter(|_| field == "module")
            {
                let number = ours
                    .split(',')
                    .next()
                    .and_then(|number| number.parse().ok());
                self.module = Some(version_of(number.unwrap_or_default()));
            }
            self.info.insert(field.to_owned(), value.trim().to_owned());
        }
    }

    fn info(&self, field: &str) -> &str {
        self.info.get(field).map_or("", String::as_str)
    }

    fn number(&self, field: &str) -> i64 {
        self.info(field).parse().unwrap_or_default()
    }

    /// An option; nothing, if it was not told.
    fn config(&self, option: &str) -> &str {
        self.config.get(option).map_or("", String::as_str)
    }

    fn has_aof(&self) -> bool {
        self.config("appendonly") == "yes"
    }

    fn described(&self) -> String {
        if self.refuses("info") {
            return "a server that does not say what it is".to_owned();
        }
        let server = ["valkey_version", "redis_version"].map(|field| self.info(field));
        let [valkey, redis] = server;
        let server = if valkey.is_empty() {
            format!("Redis {redis}")
        } else {
            format!("Valkey {valkey}")
        };
        let module = match &self.module {
            None => "no module".to_owned(),
            Some(version) => format!("module rlock {version}"),
        };
        let replicas = self.number("connected_slaves");
        let role = match self.info("role") {
            "slave" => "a replica",
            _ => "a primary",
        };
        format!("{server}, {module}, {role} with {replicas} replicas")
    }

    fn findings(&self) -> Found {
        let mut found = Vec::new();
        self.answers(&mut found);
        self.has_commands(&mut found);
        if !self.refuses("info") {
            self.can_be_used(&mut found);
        }
        if !self.refuses("config|get") {
            self.keeps_locks(&mut found);
        }
        if !self.refuses("info") && !self.refuses("config|get") {
            self.survives_a_restart(&mut found);
            self.has_room(&mut found);
            self.replicates(&mut found);
        }
        if self.has_aof() && !self.refuses("acl|getuser") {
            self.loads_its_file(&mut found);
        }
        self.tells_the_time(&mut found);
        found
    }

    fn answers(&self, found: &mut Found) {
        for (command, why) in &self.refused {
            let advice = if why == RENAMED {
                "look into its configuration file for what docs/operations.md says of it"
            } else {
                "ACL SETUSER this user +info +config|get +command|info +time +acl|getuser, and ask \
                 again"
            };
            let command = command.replace('|', " ").to_uppercase();
            let what = format!("it does not answer {command}: {why}");
            found.push(("rights", what, advice));
        }
    }

    /// `rename-command` may have taken them.
    fn has_commands(&self, found: &mut Found) {
        let mut needed: Vec<&str> = REPLICATED
            .into_iter()
            .filter(|name| self.lacks(name))
            .collect();
        if DELETIONS.iter().all(|name| self.lacks(name)) {
            needed.extend(DELETIONS);
        }
        if !needed.is_empty() {
            found.push((
                "commands",
                format!(
                    "it has no command {}: the module does not load there, and a replica keeps \
                     locks that were given back",
                    needed.join(", ")
                ),
                "take their rename-command lines out of its configuration file, and restart it",
            ));
        } else if let Some(name) = DELETIONS.into_iter().find(|name| self.lacks(name)) {
            self.deletes(name, found);
        }
        if self.lacks(RESTORES) && self.is_replica() {
            found.push((
                "commands",
                format!(
                    "it has no {RESTORES}: unless its primary has rlock.replicate plain, it lacks \
                     new locks, and keeps former holders of those that were handed over"
                ),
                "take the rename-command line out of its configuration file, or CONFIG SET \
                 rlock.replicate plain at its primary",
            ));
        }
        if self.lacks(CLOSES) {
            found.push((
                "commands",
                format!("it has no {CLOSES}: RLOCK.BIND refuses every connection"),
                "take the rename-command line out of its configuration file, and restart it",
            ));
        }
    }

    /// It lacks one of the two commands that delete.
    fn deletes(&self, name: &str, found: &mut Found) {
        if self.is_replica() {
            found.push((
                "commands",
                format!(
                    "it has no {name}: if its primary has, it keeps locks that were given back"
                ),
                "take the rename-command line out of its configuration file, or write it into its \
                 primary's too",
            ));
            return;
        }
        let expires_with = match self.config("lazyfree-lazy-expire") {
            "yes" => "UNLINK",
            "no" => "DEL",
            _ => return,
        };
        if expires_with == name && self.config("appendonly") == "yes" {
            found.push((
                "append-only-file",
                format!(
                    "it has no {name}, but writes it into its append-only file when a key expires: \
                     it cannot start with that file"
                ),
                if name == "DEL" {
                    "lazyfree-lazy-expire yes, in its configuration file too, then BGREWRITEAOF"
                } else {
                    "lazyfree-lazy-expire no, in its configuration file too, then BGREWRITEAOF"
                },
            ));
        }
    }

    fn can_be_used(&self, found: &mut Found) {
        let refused = self.number("rlock_calls_refused");
        if refused > 0 {
            found.push((
                "replication",
                format!(
                    "it has refused the module {refused} calls: its replicas and its append-only \
                     file may lack changes of locks, see its log"
                ),
                "report it; BGREWRITEAOF, and a full sync of each replica, repair them",
            ));
        }
        if self.is_replica() {
            found.push((
                "role",
                "it is a replica, which grants nothing".to_owned(),
                "connect to its primary, or name the sentinels with --sentinel",
            ));
            let refused = self.number("unexpected_error_replies");
            if refused > 0 {
                found.push((
                    "replication",
                    format!(
                        "it could not carry out {refused} commands of its primary: see its log"
                    ),
                    "give it back the commands that its log names, and let it sync anew: REPLICAOF \
                     NO ONE, then REPLICAOF its primary",
                ));
            }
        }
        if self.module.is_none() {
            found.push((
                "module",
                "the module is not loaded".to_owned(),
                "add `loadmodule /path/to/librlock.so` to its file and restart it, or MODULE LOAD",
            ));
        }
    }

    /// A lock has a TTL, so each policy that evicts may evict it.
    fn keeps_locks(&self, found: &mut Found) {
        let policy = self.config("maxmemory-policy");
        let limited = self.config("maxmemory") != "0";
        if limited && policy != "noeviction" {
            found.push((
                "eviction",
                format!("maxmemory-policy is {policy}: held locks are evicted when memory is full"),
                "CONFIG SET maxmemory-policy noeviction, or keep locks on a server of their own",
            ));
        }
        let limit = self.config("maxmemory").parse().unwrap_or_default();
        if limited && policy == "noeviction" && self.number("used_memory") >= limit {
            found.push((
                "memory",
                "maxmemory is reached: nobody can take a lock (OOM); held locks can be renewed and \
                 given back"
                    .to_owned(),
                "CONFIG SET maxmemory to more, or delete other keys",
            ));
        }
    }

    fn survives_a_restart(&self, found: &mut Found) {
        let (aof, fsync) = (self.has_aof(), self.config("appendfsync"));
        let grants_at_once = self.config("rlock.grant-delay-ms") == "0";
        let replicas = self.number("connected_slaves");
        if !aof && replicas == 0 && grants_at_once {
            found.push((
                "persistence",
                "a restart forgets the locks that are held, and grants them again".to_owned(),
                "CONFIG SET appendonly yes; or rlock.grant-delay-ms to the longest grace in use",
            ));
        }
        if aof && fsync == "no" {
            found.push((
                "appendfsync",
                "appendfsync is no: a crash of the machine forgets half a minute of grants"
                    .to_owned(),
                "CONFIG SET appendfsync everysec, or always",
            ));
        }
    }

    /// Many servers (Redis 7.0 and 8.0, Valkey 8.0 and 8.1) check each transaction of the file
    /// against the rights of `default`, and skip what that user may not run. The others
    /// are told too: the version does not say which patches a server has.
    fn loads_its_file(&self, found: &mut Found) {
        if !may_do_everything(&self.default_user) {
            found.push((
                "default-user",
                "the user default may not do everything: a server that loads its append-only file \
                 as that user drops the locks that are held"
                    .to_owned(),
                "ACL SETUSER default off ~* &* +@all, and so in its file of users: nobody logs in \
                 as default then",
            ));
        }
    }

    fn has_room(&self, found: &mut Found) {
        let most: i64 = self.config("maxclients").parse().unwrap_or_default();
        let clients = self.number("connected_clients");
        if most > 0 && clients.saturating_mul(10) > most.saturating_mul(8) {
            found.push((
                "maxclients",
                format!("{clients} of {most} connections are in use"),
                "raise maxclients: a client that is refused loses its locks",
            ));
        }
    }

    fn replicates(&self, found: &mut Found) {
        let replicas = self.number("connected_slaves");
        if replicas > 0 && self.config("min-replicas-to-write") == "0" {
            found.push((
                "min-replicas-to-write",
                "a primary that is cut off from its replicas goes on granting".to_owned(),
                "CONFIG SET min-replicas-to-write 1, and min-replicas-max-lag to a few seconds",
            ));
        }
    }

    fn tells_the_time(&self, found: &mut Found) {
        if let Some(ahead) = self.clock.filter(|ahead| ahead.abs() > CLOCK_MS) {
            found.push((
                "clock",
                format!("its clock is {ahead} ms ahead of this machine's"),
                "run NTP on both: leases are the server's, and dates in logs do not match",
            ));
        }
    }
}

/// Whether the user of this ACL GETUSER may use every command, key and channel.
fn may_do_everything(user: &Json) -> bool {
    let rules = |field: &str| user.get(field).and_then(Json::as_str).unwrap_or_default();
    let has = |field, all| rules(field).split(' ').any(|rule| rule == all);
    let takes_none_away = rules("commands")
        .split(' ')
        .all(|rule| rule.starts_with('+'));
    has("keys", "~*") && has("channels", "&*") && has("commands", "+@all") && takes_none_away
}

/// A difference that a working NTP does not have.
const CLOCK_MS: i64 = 1_000;

/// The slots that have no primary.
fn without_primary(unserved: i64) -> Option<Finding> {
    (unserved > 0).then(|| Finding {
        node: "all".to_owned(),
        about: "slots",
        what: format!("{unserved} slots of the cluster have no primary: their locks are not there"),
        advice: "give them to a node with CLUSTER ADDSLOTS, or run redis-cli --cluster fix",
    })
}

/// Compares the clocks of several servers.
fn between(clocks: &[i64]) -> Option<Finding> {
    let (earliest, latest) = (clocks.iter().min()?, clocks.iter().max()?);
    let apart = latest.saturating_sub(*earliest);
    (apart > CLOCK_MS).then(|| Finding {
        node: "all".to_owned(),
        about: "clocks",
        what: format!("the servers' clocks are {apart} ms apart"),
        advice: "run NTP: tokens grow across failovers only within rlock.fence-guard-ms",
    })
}

/// 10203 is 1.2.3.
fn version_of(number: i64) -> String {
    let (major, minor, patch) = (number / 10_000, number / 100 % 100, number % 100);
    format!("{major}.{minor}.{patch}")
}

/// How far the server's clock is ahead, if its answer came in the middle of the round trip.
fn ahead(told: &Json, took: Duration) -> Option<i64> {
    let half = took.checked_div(2).unwrap_or_default();
    let part = |index: usize| told.get(index)?.as_str()?.parse::<u64>().ok();
    let theirs = Duration::from_secs(part(0)?).checked_add(Duration::from_micros(part(1)?))?;
    let ours = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()?
        .checked_sub(half)?;
    let ms = |time: Duration| i64::try_from(time.as_millis()).ok();
    ms(theirs)?.checked_sub(ms(ours)?)
}
