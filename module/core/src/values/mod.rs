//! Small values that all floors above use: ids, names, numbers, times, tokens.

pub(crate) mod arena;
pub(crate) mod circle;
pub(crate) mod few;
pub(crate) mod glob;
pub(crate) mod ids;
pub(crate) mod known;
pub(crate) mod limits;
pub(crate) mod lock_key;
pub(crate) mod mode;
pub(crate) mod must_exist;
pub mod names;
pub(crate) mod number;
pub(crate) mod time;
pub(crate) mod token;
pub(crate) mod word;
