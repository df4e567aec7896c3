//! Replicas that become primaries.
