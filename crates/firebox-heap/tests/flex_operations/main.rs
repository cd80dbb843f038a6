//! Measures single operations of the Flex backend and compares them with the heap model. The rules
//! are claims about somebody else's code, and these tests check them.
//!
//! Every scenario runs real operations under a counting allocator and records the trace of what it
//! runs. The model must then predict what is alive after each step, and what each step needs while
//! it runs.

mod allocator;
mod scenario;

mod activations;
mod convolutions;
mod elementwise;
mod indexing;
mod products;
mod reductions;
mod views;
