//! Values that are not a dimension or a function.

use firebox_batch::MicroBatch;

#[derive(MicroBatch)]
struct Dims {
    #[micro_batch(dim = -1)]
    negative: Vec<u8>,
    #[micro_batch(dim = "1")]
    text: Vec<u8>,
    #[micro_batch(dim = 1u8)]
    typed: Vec<u8>,
    #[micro_batch(dim = 99999999)]
    large: Vec<u8>,
    #[micro_batch(dim)]
    absent: Vec<u8>,
    #[micro_batch(dim(1))]
    parenthesized: Vec<u8>,
}

#[derive(MicroBatch)]
#[micro_batch(weight = "Quoted::tokens")]
struct Quoted(Vec<u8>);

#[derive(MicroBatch)]
#[micro_batch(weight = |batch| 1.0)]
struct Closure(Vec<u8>);

#[derive(MicroBatch)]
#[micro_batch(weight)]
struct Absent(Vec<u8>);

#[derive(MicroBatch)]
#[micro_batch(weight = 2.0)]
struct Number(Vec<u8>);

fn main() {}
