//! Tests which IDX files the example `mnist` refuses. They are in the example's own file, and run
//! here without its feature, which downloads a data set.

#[path = "../examples/mnist/idx.rs"]
mod idx;
