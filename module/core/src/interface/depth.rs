//! How much of a lock must be read for a decision.

/// How much of a read-write lock must be read for a decision.
///
/// Of others a brief look tells whether one of them reads, with the key's end for theirs: it is
/// over as soon as one is found. A whole look reads the leases of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadDepth {
    /// What the owner itself has, as if nobody else were there: enough to tell whether it still
    /// has it, and until when.
    Own,
    /// When the owner's own lease ends, and the others in brief.
    Brief,
    /// When the owner's own lease ends; and those of the others, but in brief if the owner has
    /// nothing there, or the key outlives its own reading. Then the key ends with somebody else's
    /// lease, and stays as it is or is prolonged: so among many readers each entry, release or
    /// renewal need not look at all the others.
    WholeUnlessOutlived,
    /// When the leases of the others and the owner's own end.
    Whole,
}

impl ReadDepth {
    /// Whether a look at the others is brief, where the owner has something there or has not, and
    /// the key outlives its own reading or does not.
    pub fn others_are_brief(self, has_own: bool, is_outlived: bool) -> bool {
        match self {
            Self::Own | Self::Brief => true,
            Self::WholeUnlessOutlived => is_outlived || !has_own,
            Self::Whole => false,
        }
    }
}
