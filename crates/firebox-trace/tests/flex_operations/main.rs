//! Measures single operations of the Flex backend and compares them with the heap model: the rules are claims about
//! somebody else's code, and this is where they are tested.
//!
//! Every scenario runs real operations under a counting allocator and writes the trace of what it runs. Then the
//! model must know what is alive after each step, and what each step needs on the way.

mod allocator;
mod scenario;

mod activations;
mod convolutions;
mod elementwise;
mod indexing;
mod products;
mod reductions;
mod views;
