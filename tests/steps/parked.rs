//! What updates leave is parked between steps: the same bits with two optimizers and a moving
//! average, and less memory.

use std::path::Path;

use burn::optim::momentum::MomentumConfig;
use burn::optim::{Sgd, SgdConfig};
use firebox::{Park, PlanReport};

use super::*;

/// Two optimizers, and an average of a weight.
#[derive(Clone)]
struct Both {
    adam: Optim<B>,
    momentum: OptimizerAdaptor<Sgd<Lazy<Flex>>, Pair<B>, B>,
    average: Tensor<Lazy<Flex>, 2>,
}

/// The weights, the average, the sums that updates have read, and the plans, after five steps.
type Trained = (Vec<f32>, Vec<f32>, Vec<f32>, Vec<PlanReport>);

fn trained_with(park: Option<&Path>, memory: Bytes, reads: bool) -> Result<Trained, TrainError> {
    let mut model = Pair::<B>::new();
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let average = model.first.weight.val().inner();
    let mut both = Both { adam: AdamConfig::new().init(), momentum: sgd.init(), average };
    let builder = Learner::builder().auto_batch().memory(memory).quiet().micro_batch(16);
    let builder = match park {
        Some(folder) => builder.park_optimizer(Park::Disk(folder.to_owned())),
        None => builder,
    };
    let mut steps = builder.step_planner(&model)?;
    let mut sums = Vec::new();
    for _ in 0..5 {
        let sum = steps.step(&mut model, &mut both, &points(40), |model, both, parts| {
            let mut sum = 0.0;
            for first in [true, false] {
                let mut gradients = WeightedGradients::mean(parts.weight());
                let step = |model: &Pair<B>, points| {
                    GradientsParams::from_grads(model.loss(points).backward(), model)
                };
                parts.each(model, step, |model, grads, weight| {
                    gradients.add(model, grads, weight);
                })?;
                let grads = gradients.finish(model);
                sum = parts.update(model, |model| {
                    *model = match first {
                        true => both.adam.step(RATE, model.clone(), grads),
                        false => both.momentum.step(RATE, model.clone(), grads),
                    };
                    let weight = model.first.weight.val().inner();
                    both.average = both.average.clone() * 0.9 + weight * 0.1;
                    if reads { both.average.clone().sum().into_scalar() } else { 0.0 }
                })?;
            }
            Ok(sum)
        })?;
        sums.push(sum);
    }
    let average = both.average.into_data().to_vec::<f32>().expect("floats");
    Ok((weights(&model), average, sums, steps.plans().to_vec()))
}

#[test]
fn parked_loops_have_the_same_bits() {
    let folder = tempfile::tempdir().expect("a folder");
    let plenty = Bytes::mib(64);
    let (weights, average, sums, as_it_is) = trained_with(None, plenty, true).expect("it fits");
    let parked = trained_with(Some(folder.path()), plenty, true).expect("it fits");
    assert_eq!((&parked.0, &parked.1, &parked.2), (&weights, &average, &sums));
    let (as_it_is, parked) = (as_it_is[0].predicted(), parked.3[0].predicted());
    assert!(parked < as_it_is, "{parked} instead of {as_it_is}");
    // A budget in which only parked state fits.
    let budget = parked + (as_it_is - parked).scale(0.5);
    assert!(matches!(trained_with(None, budget, false), Err(TrainError::Plan { .. })));
    let within = trained_with(Some(folder.path()), budget, false).expect("it fits");
    assert_eq!((within.0, within.1), (weights, average));
    // What reads values is planned by running it, with the state where it is.
    let reads = trained_with(Some(folder.path()), budget, true);
    assert!(matches!(reads, Err(TrainError::Plan { .. })), "{:?}", reads.err());
}

#[test]
fn an_update_that_panics_leaves_the_parked_model_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let park = Park::Disk(folder.path().to_owned());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let mut steps = builder.park_optimizer(park).step_planner(&model).expect("it is ready");
    step(&mut steps, &mut model, &mut optim, &points::<B>(40)).expect("it fits");
    let before = weights(&model);
    let failed =
        steps.step(&mut model, &mut optim, &points::<B>(40), |model, _: &mut Optim<B>, parts| {
            parts.update(model, |model| {
                model.first.weight = model.first.weight.clone().map(|weight| weight * 2.0);
                assert!(is_rehearsal(), "the user's own words");
            })
        });
    let error = failed.expect_err("it panics");
    assert!(matches!(error, TrainError::OptimizerPanicked { .. }), "{error}");
    assert_eq!(weights(&model), before);
}

#[test]
fn a_folder_that_is_not_there_is_an_error() {
    let park = Park::Disk("/no/such/folder".into());
    let builder = Learner::builder().auto_batch().memory(Bytes::mib(64)).quiet();
    let error = builder.park_optimizer(park).step_planner(&Pair::<B>::new()).map(drop);
    let error = error.expect_err("there is no folder").to_string();
    assert!(error.contains("/no/such/folder"), "{error}");
}

#[test]
fn state_that_is_loaded_is_parked() {
    use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
    type Bytewise = BinBytesRecorder<FullPrecisionSettings>;

    let folder = tempfile::tempdir().expect("a folder");
    let begin = |park: bool, memory: Bytes, model: &Pair<B>| {
        let builder = Learner::builder().auto_batch().memory(memory).quiet();
        let park = park.then(|| Park::Disk(folder.path().to_owned()));
        let builder = match park {
            Some(park) => builder.park_optimizer(park),
            None => builder,
        };
        builder.step_planner(model).expect("it is ready")
    };
    let (mut model, mut optim) = (Pair::<B>::new(), AdamConfig::new().init());
    let mut steps = begin(false, Bytes::mib(64), &model);
    step(&mut steps, &mut model, &mut optim, &points(40)).expect("it fits");
    let record: Vec<u8> = Bytewise::new().record(optim.to_record(), ()).expect("it is recorded");
    let saved = model.clone();
    step(&mut steps, &mut model, &mut optim, &points(40)).expect("it fits");
    drop(steps);
    let (went_on, mut predicted) = (weights(&model), Vec::new());
    for park in [false, true] {
        let (mut model, optim) = (saved.clone(), AdamConfig::new().init::<B, Pair<B>>());
        let mut steps = begin(park, Bytes::mib(64), &model);
        let load = || Bytewise::new().load(record.clone(), &Default::default());
        let record = steps.load(load).expect("there is room").expect("it was recorded here");
        let mut optim = optim.load_record(record);
        step(&mut steps, &mut model, &mut optim, &points(40)).expect("it fits");
        assert_eq!(weights(&model), went_on);
        predicted.push(steps.plans()[0].predicted());
    }
    assert!(predicted[1] < predicted[0], "{predicted:?}");
}
