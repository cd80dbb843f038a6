//! The property training relies on: however a batch is cut, its pieces joined again are the batch.

mod grid;

use firebox_batch::MicroBatch;
use proptest::prelude::*;

use grid::Grid;

#[derive(Clone, Debug, PartialEq, MicroBatch)]
struct Inputs {
    ids: Vec<u32>,
    masks: Option<Vec<bool>>,
}

#[derive(Clone, Debug, PartialEq, MicroBatch)]
#[micro_batch(weight = Batch::kept)]
struct Batch {
    inputs: Inputs,
    pair: (Vec<String>, Vec<(u8, i64)>),
    #[micro_batch(dim = 1)]
    columns: Grid,
    #[micro_batch(each)]
    views: Vec<Vec<u32>>,
    #[micro_batch(shared)]
    classes: Vec<u8>,
}

impl Batch {
    fn kept(&self) -> f64 {
        let masks = self.inputs.masks.as_ref();
        masks.map_or(self.inputs.ids.len(), |masks| masks.iter().filter(|kept| **kept).count())
            as f64
    }

    /// Appends `next` to this piece, without using the crate under test.
    fn append(&mut self, next: Self) {
        self.inputs.ids.extend(next.inputs.ids);
        if let (Some(masks), Some(more)) = (&mut self.inputs.masks, next.inputs.masks) {
            masks.extend(more);
        }
        self.pair.0.extend(next.pair.0);
        self.pair.1.extend(next.pair.1);
        for (row, more) in self.columns.0.iter_mut().zip(next.columns.0) {
            row.extend(more);
        }
        for (view, more) in self.views.iter_mut().zip(next.views) {
            view.extend(more);
        }
        assert_eq!(self.classes, next.classes);
    }
}

fn batches() -> impl Strategy<Value = Batch> {
    (1..40_usize, 0..3_usize, 1..4_usize).prop_flat_map(|(items, views, rows)| {
        let list = || prop::collection::vec(any::<u32>(), items);
        let texts = prop::collection::vec("[a-z]{0,3}".prop_map(String::from), items);
        (
            list(),
            prop::option::of(prop::collection::vec(any::<bool>(), items)),
            texts,
            prop::collection::vec(any::<(u8, i64)>(), items),
            prop::collection::vec(list(), rows),
            prop::collection::vec(list(), views),
            any::<Vec<u8>>(),
        )
            .prop_map(|(ids, masks, texts, pairs, columns, views, classes)| Batch {
                inputs: Inputs { ids, masks },
                pair: (texts, pairs),
                columns: Grid(columns),
                views,
                classes,
            })
    })
}

/// A batch and where to cut it. The positions are sorted and may repeat, so pieces may be empty.
fn cut_batches() -> impl Strategy<Value = (Batch, Vec<usize>)> {
    batches().prop_flat_map(|batch| {
        let items = batch.inputs.ids.len();
        let cuts = prop::collection::vec(0..=items, 0..6).prop_map(move |mut cuts| {
            cuts.extend([0, items]);
            cuts.sort_unstable();
            cuts
        });
        (Just(batch), cuts)
    })
}

proptest! {
    #[test]
    fn pieces_put_together_are_the_whole((batch, cuts) in cut_batches()) {
        let pieces: Vec<Batch> = cuts.windows(2).map(|cut| batch.range(cut[0]..cut[1])).collect();
        for (piece, cut) in pieces.iter().zip(cuts.windows(2)) {
            prop_assert_eq!(piece.items(), Ok(cut[1] - cut[0]));
        }
        let weight: f64 = pieces.iter().map(MicroBatch::weight).sum();
        prop_assert_eq!(weight, batch.weight());
        let mut whole = pieces[0].clone();
        for piece in pieces.into_iter().skip(1) {
            whole.append(piece);
        }
        prop_assert_eq!(whole, batch);
    }

    #[test]
    fn a_range_of_a_range_is_a_range((batch, cuts) in cut_batches()) {
        let (from, to) = (cuts[cuts.len() / 2], cuts[cuts.len() - 1]);
        let piece = batch.range(from..to);
        for item in 0..to - from {
            prop_assert_eq!(piece.range(item..item + 1), batch.range(from + item..from + item + 1));
        }
    }
}
