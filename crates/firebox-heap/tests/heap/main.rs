//! The heap model on traces that are written by hand.

mod builder;

mod categories;
mod lifetimes;
mod methods;
mod properties;
