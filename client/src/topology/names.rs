//! Which node is meant. A node is who the cluster says it is, by its id. It may have several
//! addresses, and which of them is told depends on who is asked, and when.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::wire::{Address, Member, Range};

/// What tells one node from another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Name {
    Id(Box<str>),
    /// Nobody has told the id of the node at this address, or not yet.
    At(Address),
}

/// The name of a node of which the one at `asked` has told.
pub(crate) fn name_of(node: &Member, asked: &Address) -> Name {
    let at = || Name::At(asked.or_at(node.host.clone(), node.port));
    node.id.clone().map_or_else(at, Name::Id)
}

/// The names and addresses of all nodes of which the cluster has told, replicas too.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// Under each address the node that was said to be there last.
    names: BTreeMap<Address, Arc<Name>>,
    /// Where each is, by what was told of it last. The first is where it wants to be asked.
    addresses: BTreeMap<Arc<Name>, Vec<Address>>,
}

impl Names {
    /// Takes over what the node at `asked` says. Forgets all of which it does not tell, but not
    /// those who are still `used`.
    pub(crate) fn learn(&mut self, ranges: &[Range], asked: &Address, used: &BTreeSet<Arc<Name>>) {
        self.addresses.retain(|name, _| used.contains(name));
        for node in ranges.iter().flat_map(|range| &range.nodes) {
            let at = |host| asked.or_at(host, node.port);
            let hosts = std::iter::once(node.host.clone());
            let hosts = hosts.chain(node.other_hosts.iter().cloned().map(Some));
            let name = Arc::new(name_of(node, asked));
            self.addresses.insert(name, hosts.map(at).collect());
        }
        let addresses = &self.addresses;
        self.names.retain(|_, name| addresses.contains_key(name));
        // Where a node wants to be asked, no other is meant: that is noted last.
        for (skip, take) in [(1, usize::MAX), (0, 1)] {
            for (name, addresses) in &self.addresses {
                let some = addresses.iter().skip(skip).take(take).cloned();
                self.names
                    .extend(some.map(|address| (address, Arc::clone(name))));
            }
        }
    }

    /// The node at this address.
    pub(crate) fn of(&self, address: &Address) -> Arc<Name> {
        let known = self.names.get(address).cloned();
        known.unwrap_or_else(|| Arc::new(Name::At(address.clone())))
    }

    /// The only node that is known to listen at this port.
    pub(crate) fn at_port(&self, port: u16) -> Option<Arc<Name>> {
        let there = |addresses: &[Address]| addresses.iter().any(|one| one.port == port);
        let mut there = self.addresses.iter().filter(|(_, all)| there(all));
        let (only, _) = there.next()?;
        there.next().is_none().then(|| Arc::clone(only))
    }

    /// Where this node wants to be asked.
    pub(crate) fn address(&self, name: &Name) -> Option<Address> {
        match name {
            Name::Id(_) => self.addresses.get(name)?.first().cloned(),
            Name::At(address) => Some(address.clone()),
        }
    }

    /// Whether this node was said to be there when it was told of last.
    pub(crate) fn is_at(&self, name: &Name, address: &Address) -> bool {
        let told = self.addresses.get(name);
        told.is_some_and(|told| told.contains(address))
            || matches!(name, Name::At(own) if own == address)
    }

    /// Where each of them wants to be asked.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.addresses.values().filter_map(|all| all.first())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::named;

    const ASKED: &str = "asked";

    fn address((host, port): (&str, u16)) -> Address {
        let host = host.into();
        Address { host, port }
    }

    fn node(id: &str, host: &str, port: u16, other_hosts: &[&str]) -> Member {
        Member {
            id: named(id),
            host: named(host),
            port,
            other_hosts: other_hosts.iter().map(|host| Box::from(*host)).collect(),
        }
    }

    fn learn(names: &mut Names, nodes: Vec<Member>) {
        let range = Range {
            first: 0,
            last: 0,
            nodes,
        };
        names.learn(&[range], &address((ASKED, 9)), &BTreeSet::new());
    }

    fn id(id: &str) -> Name {
        Name::Id(id.into())
    }

    #[test]
    fn a_node_has_one_name_at_all_addresses_by_which_it_was_ever_told_of() {
        let mut names = Names::default();
        learn(&mut names, vec![node("x", "10.0.0.1", 1, &[])]);
        learn(&mut names, vec![node("x", "name", 1, &["10.0.0.2"])]);
        learn(&mut names, vec![node("x", "", 1, &["name"])]);
        for host in ["10.0.0.1", "10.0.0.2", "name", ASKED] {
            assert_eq!(*names.of(&address((host, 1))), id("x"), "{host}");
        }
        let other = address(("name", 2));
        assert_eq!(*names.of(&other), Name::At(other));
        assert_eq!(names.address(&id("x")), Some(address((ASKED, 1))));
        let told = ["10.0.0.1", "10.0.0.2", "name", ASKED];
        let told = told.map(|host| names.is_at(&id("x"), &address((host, 1))));
        assert_eq!(told, [false, false, true, true], "what was told last");
        assert_eq!(names.addresses().count(), 1);
    }

    #[test]
    fn an_address_is_that_of_the_node_that_was_told_to_be_there_last() {
        let mut names = Names::default();
        let (a, b) = (address(("a", 1)), address(("b", 1)));
        learn(
            &mut names,
            vec![node("x", "a", 1, &[]), node("y", "b", 1, &[])],
        );
        learn(
            &mut names,
            vec![node("x", "b", 1, &[]), node("y", "a", 1, &[])],
        );
        assert_eq!((&*names.of(&a), &*names.of(&b)), (&id("y"), &id("x")));
        // Where one wants to be asked the other is not meant.
        learn(
            &mut names,
            vec![node("x", "a", 1, &["b"]), node("y", "b", 1, &["a"])],
        );
        assert_eq!((&*names.of(&a), &*names.of(&b)), (&id("x"), &id("y")));
    }

    #[test]
    fn a_node_that_nobody_tells_of_is_forgotten_unless_it_serves() {
        let mut names = Names::default();
        learn(
            &mut names,
            vec![node("x", "a", 1, &[]), node("y", "b", 1, &[])],
        );
        let serving = BTreeSet::from([Arc::new(id("x"))]);
        names.learn(&[], &address((ASKED, 9)), &serving);
        assert_eq!(*names.of(&address(("a", 1))), id("x"));
        assert_eq!(names.address(&id("x")), Some(address(("a", 1))));
        let forgotten = address(("b", 1));
        assert_eq!(*names.of(&forgotten), Name::At(forgotten));
        assert_eq!(names.address(&id("y")), None);
    }

    #[test]
    fn without_an_id_a_node_is_its_address() {
        let mut names = Names::default();
        learn(
            &mut names,
            vec![node("", "a", 1, &[]), node("", "", 1, &[])],
        );
        for host in ["a", ASKED] {
            let address = address((host, 1));
            let name = Name::At(address.clone());
            assert_eq!(*names.of(&address), name);
            assert!(names.is_at(&name, &address));
        }
    }

    #[test]
    fn a_node_without_a_host_is_the_only_one_at_its_port() {
        let mut names = Names::default();
        let nodes = [("x", "a", 1), ("y", "b", 2), ("z", "c", 2)];
        let nodes = nodes.map(|(id, host, port)| node(id, host, port, &["name"]));
        learn(&mut names, nodes.into());
        assert_eq!(names.at_port(1).as_deref(), Some(&id("x")));
        assert_eq!(names.at_port(2), None, "it may be either");
        assert_eq!(names.at_port(3), None);
    }
}
