//! Lists in which every element is cut, as `#[micro_batch(each)]` requires.

/// A list of values that each hold all items, such as one tensor per resolution of an image
/// pyramid.
///
/// Implemented for `Vec<T>`, `[T; N]` and an `Option` of these. An empty list and `None` have no
/// elements and count no items.
///
/// ```
/// use firebox_batch::MicroBatch;
///
/// #[derive(MicroBatch)]
/// struct Views {
///     /// Two cameras, one frame per item each.
///     #[micro_batch(each)]
///     frames: Vec<Vec<u8>>,
/// }
///
/// let views = Views { frames: vec![vec![1, 2, 3], vec![4, 5, 6]] };
/// assert_eq!(views.items(), Ok(3));
/// assert_eq!(views.range(0..2).frames, [[1, 2], [4, 5]]);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a list of batches",
    label = "`{Self}` has no elements to cut one by one",
    note = "`#[micro_batch(each)]` is for fields that are a `Vec<T>`, a `[T; N]` or an `Option` of them",
    note = "without it the field is cut as its type says, and with `#[micro_batch(shared)]` not at all"
)]
pub trait Elements: Sized {
    /// The type of the elements.
    type Element;

    /// The elements, in order.
    fn elements(&self) -> impl Iterator<Item = &Self::Element>;

    /// Returns a list of the same length with `cut` applied to every element, in order.
    #[must_use]
    fn map_elements(&self, cut: impl FnMut(&Self::Element) -> Self::Element) -> Self;
}

impl<T> Elements for Vec<T> {
    type Element = T;

    fn elements(&self) -> impl Iterator<Item = &T> {
        self.iter()
    }

    fn map_elements(&self, cut: impl FnMut(&T) -> T) -> Self {
        self.iter().map(cut).collect()
    }
}

impl<T, const N: usize> Elements for [T; N] {
    type Element = T;

    fn elements(&self) -> impl Iterator<Item = &T> {
        self.iter()
    }

    fn map_elements(&self, cut: impl FnMut(&T) -> T) -> Self {
        self.each_ref().map(cut)
    }
}

impl<L: Elements> Elements for Option<L> {
    type Element = L::Element;

    fn elements(&self) -> impl Iterator<Item = &L::Element> {
        self.iter().flat_map(L::elements)
    }

    fn map_elements(&self, cut: impl FnMut(&L::Element) -> L::Element) -> Self {
        self.as_ref().map(|list| list.map_elements(cut))
    }
}
