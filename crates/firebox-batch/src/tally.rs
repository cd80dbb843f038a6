//! Counts the items of a batch field by field. The derive and hand-written impls build `items` from
//! it.

use crate::{MicroBatch, MicroBatchError};

/// Counts the items of a batch field by field.
///
/// The first field that counts items sets the number, and every further field must agree. A field
/// that counts no items, such as `None`, is skipped. Shared fields are not tallied at all.
///
/// ```
/// use firebox_batch::{MicroBatchError, Tally};
///
/// let (words, labels) = (vec!["ash", "ember"], vec![0, 1, 1]);
/// let error = Tally::new("Sentences")
///     .field("words", &words)?
///     .field("labels", &labels)
///     .unwrap_err();
/// assert!(error.to_string().starts_with(
///     "items disagree in `Sentences`: `words` has 2 and `labels` has 3"
/// ));
/// # Ok::<(), MicroBatchError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "end the tally with `items()`"]
pub struct Tally {
    owner: &'static str,
    first: Option<Counted>,
}

/// The field that set the number of items.
#[derive(Clone, Debug)]
struct Counted {
    field: String,
    items: usize,
}

impl Tally {
    /// A tally for the batch type `owner`, with no fields counted.
    pub fn new(owner: &'static str) -> Self {
        Self { owner, first: None }
    }

    /// Counts the items of `value`, the field called `name`.
    ///
    /// # Errors
    /// [`MicroBatchError::ItemsDisagree`] if an earlier field has a different number of items. Any
    /// error of [`value.items()`](MicroBatch::items), with field paths starting at this batch,
    /// except [`MicroBatchError::NoItems`].
    pub fn field<T: MicroBatch>(self, name: &str, value: &T) -> Result<Self, MicroBatchError> {
        self.add(name, value.items())
    }

    /// Counts `items` for the field called `name`, whose type need not be a [`MicroBatch`].
    ///
    /// # Errors
    /// [`MicroBatchError::ItemsDisagree`] if an earlier field has a different number of items.
    pub fn count(mut self, name: &str, items: usize) -> Result<Self, MicroBatchError> {
        match &self.first {
            Some(first) if first.items != items => Err(MicroBatchError::ItemsDisagree {
                owner: self.owner,
                first: first.field.clone(),
                first_items: first.items,
                second: name.to_owned(),
                second_items: items,
            }),
            Some(_) => Ok(self),
            None => {
                let field = name.to_owned();
                self.first = Some(Counted { field, items });
                Ok(self)
            }
        }
    }

    /// The number of items on which all counted fields agree.
    ///
    /// # Errors
    /// [`MicroBatchError::NoItems`] if no field counted any items.
    pub fn items(self) -> Result<usize, MicroBatchError> {
        match self.first {
            Some(first) => Ok(first.items),
            None => Err(MicroBatchError::NoItems { owner: self.owner }),
        }
    }

    /// Counts the result of asking the field called `name` for its items. Skips a field without
    /// items.
    pub(crate) fn add(
        self,
        name: &str,
        items: Result<usize, MicroBatchError>,
    ) -> Result<Self, MicroBatchError> {
        match items {
            Ok(items) => self.count(name, items),
            Err(MicroBatchError::NoItems { .. }) => Ok(self),
            Err(error) => Err(error.within(self.owner, name)),
        }
    }

    /// Counts the results of asking the elements of the list called `name` for their items.
    pub(crate) fn add_each(
        self,
        name: &str,
        items: impl Iterator<Item = Result<usize, MicroBatchError>>,
    ) -> Result<Self, MicroBatchError> {
        items
            .enumerate()
            .try_fold(self, |tally, (index, items)| tally.add(&format!("{name}[{index}]"), items))
    }
}
