//! How derived and built-in batches count, cut and weigh their items, and which errors they return
//! when fields disagree.

mod grid;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::backend::Backend;
use burn_tensor::{BasicOps, Bool, Int, Tensor};
use firebox_batch::{MicroBatch, MicroBatchError, Tally};

use grid::Grid;

/// A batch that weighs what it says, inside of others.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Tokens::real)]
struct Tokens {
    rows: Vec<[u8; 2]>,
}

impl Tokens {
    fn real(&self) -> f64 {
        self.rows.iter().flatten().filter(|token| **token > 0).count() as f64
    }
}

#[derive(Clone, Debug, MicroBatch)]
struct Pairs {
    source: Vec<u8>,
    target: Option<Tokens>,
}

/// Its own weight counts, whatever that of a field is.
#[derive(Clone, Debug, MicroBatch)]
#[micro_batch(weight = Twice::twice)]
struct Twice(Pairs);

impl Twice {
    fn twice(&self) -> f64 {
        2.0 * self.0.weight()
    }
}

#[derive(Clone, Debug, MicroBatch)]
struct Views {
    #[micro_batch(each)]
    views: Vec<Tokens>,
}

#[derive(Clone, Debug, MicroBatch)]
struct Over<T: MicroBatch>(Vec<u8>, T);

#[test]
fn a_batch_weighs_what_a_field_of_it_weighs() {
    let tokens = Tokens { rows: vec![[1, 2], [3, 0], [0, 0]] };
    let pairs = Pairs { source: vec![7; 3], target: Some(tokens.clone()) };
    assert_eq!(pairs.weight(), 3.0);
    assert_eq!(pairs.range(1..3).weight(), 1.0);
    assert_eq!(Twice(pairs.clone()).weight(), 6.0);
    assert_eq!((vec![7; 3], tokens.clone()).weight(), 3.0);
    assert_eq!((pairs.clone(), vec![7; 3]).range(0..1).weight(), 2.0);
    assert_eq!(Over(vec![7; 3], pairs).weight(), 3.0);
    assert_eq!(Over(vec![7; 3], vec![7; 3]).weight(), 3.0);
    // Two fields may weigh the same, but not something different.
    assert_eq!((tokens.clone(), tokens.clone()).weight(), 3.0);
    let two = (Tokens { rows: vec![[1, 1]; 3] }, tokens.range(1..2));
    let two = (two.0.range(0..1), two.1, Tokens { rows: vec![[0, 0]] });
    let panic = std::panic::catch_unwind(|| two.weight()).expect_err("which one counts?");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(text.contains("weigh 2 and 0: name a function for the whole batch"), "{text}");
    let each = Views { views: vec![tokens.clone(), tokens] };
    assert_eq!(each.range(1..3).weight(), 1.0);
}

#[track_caller]
fn check_error<T: MicroBatch>(batch: &T, expected: &str) {
    let error = batch.items().expect_err("the batch is wrong");
    let text = error.to_string();
    assert!(text.starts_with(expected), "{text}");
}

#[derive(Clone, Debug, PartialEq, MicroBatch)]
struct Inputs {
    ids: Vec<u32>,
    mask: Vec<bool>,
}

#[derive(Clone, Debug, PartialEq, MicroBatch)]
struct Batch {
    inputs: Inputs,
    targets: Option<Vec<u8>>,
    pairs: (Vec<u8>, Option<Vec<u8>>),
    #[micro_batch(dim = 1)]
    states: Grid,
    rows: Grid,
    #[micro_batch(each)]
    views: [Vec<u32>; 2],
    #[micro_batch(each, dim = 1)]
    layers: Option<Vec<Grid>>,
    #[micro_batch(shared)]
    names: Arc<[&'static str]>,
}

/// A grid of `rows` rows and `columns` columns with distinct numbers (up to 100 columns).
fn grid(rows: usize, columns: usize) -> Grid {
    let row = |row| (0..columns).map(move |column| (100 * row + column) as u32);
    Grid((0..rows).map(|index| row(index).collect()).collect())
}

fn batch(items: usize) -> Batch {
    let numbers = |from: usize| (from..from + items).map(|number| number as u32).collect();
    let bytes = |from: usize| (from..from + items).map(|number| number as u8).collect();
    Batch {
        inputs: Inputs { ids: numbers(0), mask: vec![true; items] },
        targets: Some(bytes(10)),
        pairs: (bytes(20), None),
        states: grid(2, items),
        rows: grid(items, 2),
        views: [numbers(30), numbers(40)],
        layers: Some(vec![grid(1, items), grid(3, items)]),
        names: Arc::new(["cat", "dog"]),
    }
}

#[test]
fn a_range_cuts_every_field_its_own_way() {
    let whole = batch(5);
    assert_eq!(whole.items(), Ok(5));
    let piece = whole.range(1..3);
    assert_eq!(piece.items(), Ok(2));
    assert_eq!(piece.inputs, Inputs { ids: vec![1, 2], mask: vec![true, true] });
    assert_eq!(piece.targets, Some(vec![11, 12]));
    assert_eq!(piece.pairs, (vec![21, 22], None));
    assert_eq!(piece.states, Grid(vec![vec![1, 2], vec![101, 102]]));
    assert_eq!(piece.rows, Grid(vec![vec![100, 101], vec![200, 201]]));
    assert_eq!(piece.views, [[31, 32], [41, 42]]);
    let layers = piece.layers.expect("the list is there");
    assert_eq!(layers[1], Grid(vec![vec![1, 2], vec![101, 102], vec![201, 202]]));
    assert!(Arc::ptr_eq(&piece.names, &whole.names));
}

#[test]
fn the_whole_range_is_the_batch() {
    assert_eq!(batch(4).range(0..4), batch(4));
}

#[test]
fn fields_that_disagree_are_named_with_their_lengths() {
    let mut wrong = batch(3);
    wrong.targets = Some(vec![1, 2]);
    check_error(&wrong, "items disagree in `Batch`: `inputs` has 3 and `targets` has 2;");
    assert_eq!(
        wrong.items(),
        Err(MicroBatchError::ItemsDisagree {
            owner: "Batch",
            first: "inputs".into(),
            first_items: 3,
            second: "targets".into(),
            second_items: 2,
        })
    );
}

#[test]
fn a_field_inside_a_field_is_named_by_its_path() {
    let mut wrong = batch(3);
    wrong.inputs.mask.pop();
    check_error(&wrong, "items disagree in `Batch`: `inputs.ids` has 3 and `inputs.mask` has 2;");
    check_error(
        &(vec![1], (vec![1, 2], vec![1])),
        "items disagree in `(A, B)`: `1.0` has 2 and `1.1` has 1;",
    );
    let mut wrong = batch(3);
    wrong.pairs.1 = Some(vec![1]);
    check_error(&wrong, "items disagree in `Batch`: `pairs.0` has 3 and `pairs.1` has 1;");
}

#[test]
fn an_element_is_named_by_its_index() {
    #[derive(MicroBatch)]
    struct Views {
        #[micro_batch(each)]
        views: Vec<Inputs>,
    }
    let good = Inputs { ids: vec![1, 2], mask: vec![true, false] };
    let short = good.range(0..1);
    let uneven = Inputs { ids: vec![1, 2], mask: vec![true] };
    check_error(
        &Views { views: vec![good.clone(), short] },
        "items disagree in `Views`: `views[0]` has 2 and `views[1]` has 1;",
    );
    check_error(
        &Views { views: vec![good, uneven] },
        "items disagree in `Views`: `views[1].ids` has 2 and `views[1].mask` has 1;",
    );
}

#[test]
fn a_dimension_beyond_the_rank_is_named() {
    #[derive(MicroBatch)]
    struct Wide {
        #[micro_batch(each, dim = 2)]
        layers: Vec<Grid>,
    }
    #[derive(MicroBatch)]
    struct Outer(Wide);

    let outer = Outer(Wide { layers: vec![grid(1, 1)] });
    check_error(
        &outer,
        "`0.layers[0]` in `Outer` has no dim 2, its rank is 2: write `#[micro_batch(dim = ...)]` with a number below 2",
    );
}

#[test]
fn absent_fields_count_no_items() {
    #[derive(Debug, PartialEq, MicroBatch)]
    struct Sparse {
        maybe: Option<Inputs>,
        #[micro_batch(each)]
        list: Vec<Vec<u8>>,
        #[micro_batch(dim = 1)]
        grid: Option<Grid>,
        both: (Option<Vec<u8>>, Option<Vec<u8>>),
        labels: Option<Vec<u8>>,
    }
    let labels = Some(vec![1, 2]);
    let mut sparse = Sparse { maybe: None, list: vec![], grid: None, both: (None, None), labels };
    assert_eq!(sparse.items(), Ok(2));
    assert_eq!(sparse.range(1..2).labels, Some(vec![2]));
    assert_eq!(sparse.range(0..2), sparse);

    sparse.labels = None;
    assert_eq!(sparse.items(), Err(MicroBatchError::NoItems { owner: "Sparse" }));
    check_error(&sparse, "nothing in `Sparse` counts items: fill");
}

#[test]
fn a_list_is_one_item_per_element_unless_marked() {
    let pictures = vec![vec![1, 2, 3], vec![4]];
    assert_eq!(pictures.items(), Ok(2));
    assert_eq!(pictures.range(1..2), [[4]]);
    assert_eq!(pictures.range(1..1), Vec::<Vec<i32>>::new());
}

#[test]
#[should_panic(expected = "range end index 3 out of range")]
fn a_range_outside_the_items_panics() {
    let _ = vec![1, 2].range(1..3);
}

#[test]
fn tuples_have_up_to_six_fields() {
    let one = || vec![1, 2];
    let six = (one(), one(), one(), one(), one(), one());
    assert_eq!(six.items(), Ok(2));
    assert_eq!(six.range(1..2).5, [2]);
    assert_eq!((one(), one(), one(), one(), one()).items(), Ok(2));
}

mod weighing {
    use super::{Inputs, MicroBatch};

    /// The divisor of a loss that is a mean over unmasked tokens.
    pub fn unmasked(batch: &Masked) -> f64 {
        batch.0.mask.iter().filter(|kept| **kept).count() as f64
    }

    #[derive(MicroBatch)]
    #[micro_batch(weight = self::unmasked)]
    pub struct Masked(pub Inputs);

    #[derive(MicroBatch)]
    #[micro_batch(weight = Generic::<T>::total)]
    pub struct Generic<T: Clone + Into<f64>> {
        pub values: Vec<T>,
    }

    impl<T: Clone + Into<f64>> Generic<T> {
        fn total(&self) -> f64 {
            self.values.iter().cloned().map(Into::into).sum()
        }
    }
}

#[test]
fn the_weight_is_the_number_of_items_or_what_the_struct_says() {
    let inputs = Inputs { ids: vec![1, 2, 3], mask: vec![true, false, true] };
    assert_eq!(inputs.weight(), 3.0);
    let masked = weighing::Masked(inputs);
    assert_eq!(masked.weight(), 2.0);
    assert_eq!(masked.range(1..2).weight(), 0.0);
    let generic = weighing::Generic { values: vec![1.5_f32, 2.5] };
    assert_eq!(generic.weight(), 4.0);
    assert_eq!(generic.range(1..2).weight(), 2.5);
    assert_eq!(Some(generic).weight(), 4.0);
    assert_eq!(None::<Vec<u8>>.weight(), 0.0);
}

#[test]
#[should_panic(expected = "has no weight: items disagree in `(A, B)`")]
fn the_weight_of_a_batch_without_a_number_of_items_panics() {
    let _ = (vec![1], vec![1, 2]).weight();
}

#[test]
fn a_batch_by_hand_takes_two_methods() {
    #[derive(Clone)]
    struct Ragged {
        values: Vec<u8>,
        ends: Vec<usize>,
    }
    impl MicroBatch for Ragged {
        fn items(&self) -> Result<usize, MicroBatchError> {
            Tally::new("Ragged").count("ends", self.ends.len())?.items()
        }
        fn range(&self, range: Range<usize>) -> Self {
            let end = |item: usize| item.checked_sub(1).map_or(0, |last| self.ends[last]);
            let (from, to) = (end(range.start), end(range.end));
            Self {
                values: self.values[from..to].to_vec(),
                ends: self.ends[range].iter().map(|end| end - from).collect(),
            }
        }
    }
    #[derive(MicroBatch)]
    struct Holder {
        ragged: Ragged,
        labels: Vec<u8>,
    }
    let ragged = Ragged { values: vec![1, 2, 3, 4, 5], ends: vec![2, 2, 5] };
    let holder = Holder { ragged, labels: vec![7, 8, 9] };
    assert_eq!(holder.items(), Ok(3));
    assert_eq!(holder.weight(), 3.0);
    let piece = holder.range(1..3);
    assert_eq!((piece.ragged.values, piece.ragged.ends), (vec![3, 4, 5], vec![0, 3]));
    assert_eq!(piece.labels, [8, 9]);
}

/// Batches of tensors of every kind and rank, over any backend. The test is that this compiles.
#[allow(dead_code)]
mod tensors {
    use super::*;

    #[derive(Clone, Debug, MicroBatch)]
    struct Kinds<B: Backend> {
        images: Tensor<B, 4>,
        ids: Tensor<B, 1, Int>,
        mask: Option<Tensor<B, 2, Bool>>,
        #[micro_batch(dim = 2)]
        states: Tensor<B, 3>,
        #[micro_batch(dim = 1)]
        maybe: Option<Tensor<B, 2>>,
        #[micro_batch(each)]
        pyramid: Vec<Tensor<B, 4>>,
        #[micro_batch(each, dim = 1)]
        layers: [Tensor<B, 3>; 2],
        variable: Vec<Tensor<B, 3>>,
        pair: (Tensor<B, 1>, Tensor<B, 1, Int>),
        #[micro_batch(shared)]
        weights: Tensor<B, 1>,
        #[micro_batch(shared)]
        device: PhantomData<fn(B::FloatElem)>,
    }

    #[derive(Clone, MicroBatch)]
    struct AnyKind<B, const D: usize, K, T = u8>(Tensor<B, D, K>, #[micro_batch(shared)] T)
    where
        B: Backend,
        K: BasicOps<B>;

    #[derive(Clone, MicroBatch)]
    #[micro_batch(weight = tokens)]
    struct Nested<'a, B: Backend, X> {
        inner: AnyKind<B, 2, Int>,
        other: X,
        #[micro_batch(shared)]
        r#type: &'a str,
    }

    fn tokens<B: Backend, X>(batch: &Nested<'_, B, X>) -> f64 {
        batch.inner.0.dims()[1] as f64
    }

    fn is_batch<T: MicroBatch>() {}

    fn over_any_backend<B: Backend>() {
        is_batch::<Kinds<B>>();
        is_batch::<AnyKind<B, 3, Bool>>();
        is_batch::<Nested<'static, B, Vec<String>>>();
    }

    mod private {
        use firebox_batch::MicroBatch;

        #[derive(Clone, MicroBatch)]
        struct Hidden<T>(Vec<T>);

        /// A public batch with a private generic field. The bound on the field must not leak.
        #[derive(MicroBatch)]
        pub struct Open<T> {
            hidden: Hidden<T>,
            #[micro_batch(each)]
            more: Vec<Hidden<T>>,
        }
    }
}

/// A batch generated by a macro, whose literals and paths arrive in invisible groups.
#[test]
fn attributes_take_what_a_macro_substitutes() {
    macro_rules! columns {
        ($name:ident, $dim:literal, $ty:ty, $weight:path) => {
            #[derive(MicroBatch)]
            #[micro_batch(weight = $weight)]
            struct $name {
                #[micro_batch(dim = $dim)]
                columns: $ty,
            }
        };
    }
    fn one(_: &Columns) -> f64 {
        1.0
    }
    columns!(Columns, 1, Grid, one);
    let columns = Columns { columns: grid(1, 4) };
    assert_eq!((columns.items(), columns.weight()), (Ok(4), 1.0));
    assert_eq!(columns.range(3..4).columns, Grid(vec![vec![3]]));
}
