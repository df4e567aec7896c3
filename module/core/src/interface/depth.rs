//! How much of a lock must be read for a decision.

/// How much of a read-write lock must be read for a decision.
///
/// A brief look at the others only tells whether another owner reads, and takes the end of the key
/// for the end of its lease. It stops at the first owner that it finds. A whole look reads the
/// leases of all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadDepth {
    /// Only the owner's own hold, as if there were no others: enough to tell whether the owner
    /// still has it, and until when.
    Own,
    /// The end of the owner's own lease, and a brief look at the others.
    Brief,
    /// The end of the owner's own lease, and a whole look at the others. It is a brief one if the
    /// owner has no hold there, or if the key outlives the owner's own read lease. In these cases
    /// the key ends with another owner's lease, and its expiry stays or is prolonged. So among many
    /// readers an entry, a release or a renewal need not look at all the others.
    WholeUnlessOutlived,
    /// The end of the owner's own lease, and a whole look at the others.
    Whole,
}

impl ReadDepth {
    /// Whether the look at the others is brief. It depends on whether the owner has a hold there,
    /// and on whether the key outlives the owner's own read lease.
    pub fn others_are_brief(self, has_own: bool, is_outlived: bool) -> bool {
        match self {
            Self::Own | Self::Brief => true,
            Self::WholeUnlessOutlived => is_outlived || !has_own,
            Self::Whole => false,
        }
    }
}
