//! IDX files, in which MNIST comes. `data.rs` reads them; `tests/mnist.rs` tests what is refused.
//!
//! A file begins with two zeros, the type of its values (8: bytes), the number of dimensions, and
//! each dimension as four bytes, the most significant first. The values follow.

use std::path::Path;

use anyhow::{Context, bail, ensure};

/// The pixels of an image in each direction.
pub const SIDE: usize = 28;

/// The number of digits, from zero.
const DIGITS: u8 = 10;

/// Images of one byte a pixel with their digits, from the two files of `split` in `folder`.
pub fn read(folder: &Path, split: &str) -> anyhow::Result<Vec<(Vec<u8>, u8)>> {
    let images = folder.join(format!("{split}-images-idx3-ubyte"));
    let labels = folder.join(format!("{split}-labels-idx1-ubyte"));
    let pixels = file(&images, images_of)?;
    let digits = file(&labels, labels_of)?;
    ensure!(
        pixels.len() == digits.len(),
        "{} has {} images and {} has {} labels: the files do not belong together",
        images.display(),
        pixels.len(),
        labels.display(),
        digits.len(),
    );
    Ok(pixels.into_iter().zip(digits).collect())
}

/// Reads a file as `parse` says. Errors name the file.
fn file<T>(path: &Path, parse: impl FnOnce(&[u8]) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let bytes = std::fs::read(path).with_context(|| {
        format!("cannot read {}: --data wants the four unpacked IDX files", path.display())
    })?;
    parse(&bytes).with_context(|| format!("{} cannot be used", path.display()))
}

/// The images of a file, each of [`SIDE`] x [`SIDE`] pixels.
fn images_of(bytes: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
    let ([_, height, width], pixels) = values(bytes, "images")?;
    ensure!(
        height == SIDE && width == SIDE,
        "its images have {height} x {width} pixels, and the model takes {SIDE} x {SIDE}"
    );
    Ok(pixels.chunks_exact(SIDE * SIDE).map(<[u8]>::to_vec).collect())
}

/// The digits of a file.
fn labels_of(bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let ([_], labels) = values(bytes, "labels")?;
    if let Some(at) = labels.iter().position(|label| *label >= DIGITS) {
        bail!("label {at} is {}, which is no digit", labels[at]);
    }
    Ok(labels.to_vec())
}

/// The dimensions and the values of an IDX file of bytes with `N` dimensions, at least one item.
fn values<'a, const N: usize>(
    bytes: &'a [u8],
    what: &str,
) -> anyhow::Result<([usize; N], &'a [u8])> {
    ensure!(!bytes.starts_with(&[0x1f, 0x8b]), "it is compressed: unpack it with `gunzip`");
    let header = 4 + 4 * N;
    ensure!(
        bytes.len() >= header,
        "it has {} bytes, and the header of an IDX file of {what} has {header}",
        bytes.len()
    );
    let magic = &bytes[..4];
    ensure!(
        magic == [0, 0, 8, N as u8],
        "it begins with {magic:02x?}, and an IDX file of {what} with {:02x?}",
        [0, 0, 8, N as u8]
    );
    let word = |at: usize| {
        let start = 4 + 4 * at;
        bytes[start..start + 4].iter().fold(0_usize, |word, byte| (word << 8) | usize::from(*byte))
    };
    let sizes: [usize; N] = std::array::from_fn(word);
    let values = &bytes[header..];
    let expected = sizes.iter().try_fold(1_usize, |all, size| all.checked_mul(*size));
    ensure!(
        expected == Some(values.len()),
        "its header says {} {what}, with dimensions {sizes:?}, and {} bytes follow: it was cut off or \
         changed",
        sizes[0],
        values.len()
    );
    ensure!(sizes[0] > 0, "it has no {what}");
    Ok((sizes, values))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An IDX file of bytes.
    fn idx(sizes: &[u32], values: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, sizes.len() as u8];
        sizes.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
        bytes.extend(values);
        bytes
    }

    fn images(count: u32) -> Vec<u8> {
        idx(&[count, 28, 28], &vec![7; count as usize * 28 * 28])
    }

    /// Reads two files with this content.
    fn read_both(images: &[u8], labels: &[u8]) -> anyhow::Result<Vec<(Vec<u8>, u8)>> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("train-images-idx3-ubyte"), images)?;
        std::fs::write(folder.path().join("train-labels-idx1-ubyte"), labels)?;
        read(folder.path(), "train")
    }

    /// Checks that the files are refused with the name of one of them and `expected`.
    #[track_caller]
    fn refused(images: &[u8], labels: &[u8], name: &str, expected: &str) {
        let error = read_both(images, labels).expect_err("it is refused");
        let text = format!("{error:#}");
        assert!(text.contains(name) && text.contains(expected), "{text}");
    }

    #[test]
    fn images_and_their_digits_are_read() {
        let found = read_both(&images(2), &idx(&[2], &[0, 9])).expect("they are right");
        assert_eq!(found, [(vec![7; 784], 0), (vec![7; 784], 9)]);
    }

    #[test]
    fn files_that_are_not_right_are_named() {
        const IMAGES: &str = "train-images-idx3-ubyte";
        const LABELS: &str = "train-labels-idx1-ubyte";
        let two = idx(&[2], &[1, 2]);
        refused(&[], &two, IMAGES, "it has 0 bytes");
        refused(&[0x1f, 0x8b, 8, 0], &two, IMAGES, "`gunzip`");
        refused(&two, &images(2), IMAGES, "header");
        refused(&idx(&[1, 1, 28, 28], &[0; 784]), &two, IMAGES, "it begins with [00, 00, 08, 04]");
        refused(&images(2)[..1000], &two, IMAGES, "cut off");
        refused(&[images(2), vec![0]].concat(), &two, IMAGES, "cut off");
        refused(&idx(&[u32::MAX, u32::MAX, u32::MAX], &[]), &two, IMAGES, "cut off");
        refused(&idx(&[2, 14, 56], &[0; 2 * 784]), &two, IMAGES, "14 x 56 pixels");
        refused(&images(0), &idx(&[0], &[]), IMAGES, "no images");
        refused(&images(2), &images(2), LABELS, "it begins with");
        refused(&images(2), &idx(&[3], &[1, 2]), LABELS, "cut off");
        refused(&images(2), &idx(&[2], &[1, 10]), LABELS, "label 1 is 10");
        refused(&images(2), &idx(&[1], &[1]), LABELS, "do not belong together");
    }
}
