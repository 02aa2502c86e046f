"""Every key of the configuration, with its default and its meaning."""

from ml_collections import ConfigDict


def default_config() -> ConfigDict:
    """Return the defaults of every key; methods and data sets change what they need."""
    config = ConfigDict()
    config.seed = 0  # of initial weights, order of the images, augmentation and label grouping

    config.data = data = ConfigDict()
    data.name = "digits"  # digits | digits_single | synthetic | voc2012 | voc2007 | coco2014 | nuswide | vg256 | vg500
    #                       csv | jsonl | folders | coco_json | packed | tfds:NAME, such as tfds:coco/2014
    data.root = ""  # folder of the data set; not used by digits
    data.table = "{split}.csv"  # csv, jsonl, coco_json: the file with the labels, below root; {split}: the split's name
    data.images = ""  # csv, jsonl, coco_json: the folder below root where the table's paths start; may hold {split}
    data.image_column = "image"  # csv, jsonl: the column, or key, of the image's path
    data.label_column = "labels"  # csv, jsonl: that of its label names; "" = one column a class, 1, 0 or empty
    data.labels = 20_000  # synthetic: how many labels its pictures can show
    data.separator = ";"  # csv: between label names
    data.classes = ""  # csv, jsonl, vg500: a text file below root, one class a line; "" = the names in the table
    data.train_split = "train"
    data.val_split = "val"  # "" = none
    data.test_splits = ("test",)  # evaluated at the end
    data.val_fraction = 0.0  # of the training split, drawn by `seed` and held out as val_split; 0 = it has its own
    data.image_size = 64  # pixels, square
    data.resize = "square"  # square (whatever the aspect) | crop (short side, then the centre)
    data.crop_fraction = 0.875  # crop: the side of the centre crop as a fraction of the resized short side
    data.reduced_decoding = False  # decode a large JPEG at 1/2, 1/4 or 1/8; faster, not what the papers did
    data.bad_images = "error"  # an image that is missing or unreadable: error (stop) | skip (count and list it)
    data.difficult = "negative"  # what a label marked difficult counts as: negative | ignore | positive
    data.keep_empty = False  # keep images without any positive label (own tables and folders always do)
    data.workers = 0  # processes that decode, resize and augment; 0 = threads of this one
    data.threads = 2  # in each process

    config.augment = augment = ConfigDict()  # for training batches only, in the order of these keys
    augment.where = "device"  # device (batched, jitted) | host (faster where the device is a CPU)
    #                           geometry and margin are always the host's
    augment.geometry = "none"  # none (data.resize) | random_resized_crop | multi_scale_crop (ML-GCN's)
    augment.crop_scale = (0.08, 1.0)  # random_resized_crop: share of the area
    augment.crop_ratio = (0.75, 1.3333333333333333)  # random_resized_crop: width / height
    augment.margin = 0  # multi_scale_crop: pixels by which a square resize before it exceeds image_size (ADD-GCN: 64)
    augment.flip = False  # left to right, every second image
    augment.shift = 0.0  # largest translation as a fraction of the side, borders repeated
    augment.contrast = 0.0  # factor drawn from 1 ± this
    augment.brightness = 0.0  # likewise
    augment.saturation = 0.0  # likewise
    augment.cutout = 0.0  # side of the square hole as a fraction of the image's (ML-VPT: 0.5); 0 = off
    augment.randaugment = "none"  # none | uda (ML-VPT's) | standard
    augment.randaugment_ops = 2  # standard: ops an image
    augment.randaugment_magnitude = 9  # standard: of 10

    config.model = model = ConfigDict()
    model.dtype = "float32"  # of matrix products: float32 | bfloat16; parameters stay float32
    model.remat = False  # compute each block of the backbone again in the backward pass: less memory, more time
    model.frozen_dtype = "float32"  # in which frozen weights are kept: float32 | bfloat16 (half the memory)
    model.matmul_precision = "default"  # jax_default_matmul_precision: default | high | highest (TPU: bf16 passes)

    model.backbone = backbone = ConfigDict()
    backbone.name = "vit_digits"  # a name of mlmoe_jax.models.backbones.catalog
    backbone.weights = "auto"  # auto (package, cache, download) | none (random) | a file
    backbone.batch_norm = "frozen"  # ResNet: frozen | running (affine learns) | trainable (statistics of the batch)
    backbone.normalization = "auto"  # mean and deviation of a picture's channels: as the weights expect | imagenet
    backbone.final_norm = "auto"  # read features after the last LayerNorm: yes | no | auto (as the papers do)

    model.prompts = prompts = ConfigDict()
    prompts.kind = "none"  # none | deep (VPT: a set a block) | shallow (VPT, GateVPT: one set that travels) | e2vpt
    #                        group (ML-VPT: deep, one set a label group and side)
    prompts.count = 30  # deep, shallow, e2vpt: prompts a block
    prompts.project = 0  # width in which prompts are learned before a linear layer; 0 = the backbone's, no layer
    prompts.dropout = 0.0  # of the entries of the prompts, for every image on its own
    prompts.gated = False  # shallow: a learned gate a block between a prompt before and after it (GateVPT)
    prompts.gate_init = 10.0  # gated: a gate starts at sigmoid(-gate_init)
    prompts.learn_temperature = False  # shallow: a learned temperature of the attention in every block (GateVPT)
    prompts.key_values = 10  # e2vpt: further keys and values a block
    prompts.share_key_values = True  # e2vpt: keys and values are one tensor
    prompts.masks = "none"  # e2vpt: none | learned (to see what matters) | fixed (pruned, see prune.py)
    prompts.segments = 16  # e2vpt: segments a prompt that masks can prune, interleaved
    prompts.kept_tokens = ""  # e2vpt, fixed: a 1 (kept) or 0 for each prompt; "" = all kept
    prompts.kept_segments = ()  # e2vpt, fixed: for each prompt a 1 or 0 a segment; () = all kept
    prompts.pruned = "absent"  # e2vpt, fixed: a pruned prompt is absent (paper) | zeroed, and attended to (code)
    prompts.sides = "both"  # group: both | co | dc
    prompts.num_groups = 5  # group: label groups a side
    prompts.per_group = 3  # group: prompts, and experts, a group
    prompts.mask = "all_prompts"  # group: none | all_prompts (code) | cross_group (paper)
    prompts.groups = "computed"  # computed from the training labels | published | a .json file {"co": [..], "dc": [..]}
    prompts.tau_co = 2.0  # root applied to conditional probabilities before clustering, co-occurrence side
    prompts.tau_dc = 3.0  # the same, discriminative side

    model.head = head = ConfigDict()
    head.kind = "linear"  # linear | group_experts (ML-VPT) | group_linear (GVPT: no experts) | query (Q2L, ML-Decoder)
    #                       routed_experts (DR-MoE, HSQ; with group prompts MLMoE) | ml_gcn | add_gcn | cnn_rnn
    head.pool = "cls"  # linear: classifies the cls token | patches (each, then a smooth maximum) | both
    head.expert_hidden = 5  # group_experts: width of an expert's hidden layer
    head.activation = "gelu"  # of the experts: gelu (code) | relu (paper)
    head.gates_of = "label"  # group_experts: a gate for each label | group (the ablation's strategy 1)
    head.gate_bias = "unused"  # unused (code: allocated and left out) | used (paper)
    head.combine = "mean_logit"  # two sides: mean_logit (code) | mean_probability (paper)
    head.shared_classifier = False  # one classifier for both sides, as the paper's eq. 16 prints it

    head.decoder = decoder = ConfigDict()  # query, routed_experts: learned queries that read the image's tokens
    decoder.width = 512  # 0 = the backbone's
    decoder.heads = 8
    decoder.hidden = 2048  # width of the feed-forward layers
    decoder.encoder_layers = 2
    decoder.decoder_layers = 2
    decoder.self_attention = "all"  # layers in which queries see one another: all | first | others | none
    #                                 identity (none, and LN(x + dropout(x)) in its place, as in ML-Decoder)
    decoder.query_role = "input"  # input (of the first layer) | added (to what asks, in every layer, as in Q2L)
    decoder.queries = 0  # query: how many; 0 = one a label, fewer are shared by groups of labels
    decoder.fixed_queries = False  # leave them at their random initial values
    decoder.positions = "once"  # sines added to the encoder's input | detr (in every layer) | learned | none
    decoder.pre_norm = False  # LayerNorm before the parts of a layer instead of after them
    decoder.decoder_norm = True  # LayerNorm after the last layer
    decoder.activation = "relu"  # relu | gelu
    decoder.dropout = 0.1
    decoder.project = "auto"  # to `width`: linear | linear_relu | none | auto (linear where widths differ)
    decoder.init = "xavier"  # of matrices: xavier (DETR, Q2L) | torch (ML-Decoder)

    head.routing = routing = ConfigDict()  # routed_experts
    routing.expert = "relu_linear"  # relu_linear (as printed) | ffn | ffn_relu
    routing.expert_hidden = 256
    routing.shared_experts = 4
    routing.task_experts = 1  # of each label
    routing.gate = "mlp"  # mlp (DR-MoE) | linear (HSQ) | static (the same for every image)
    routing.gate_hidden = 256  # mlp
    routing.gate_share = "per_label"  # per_label | shared
    routing.classifier = "per_label"  # per_label | shared (as printed)
    routing.spread = "compiler"  # who spreads the task experts over mesh.expert: compiler | shard_map (by hand)
    routing.entropy = "maximize"  # of the gates: maximize (as the text means it) | paper (the printed sign) | off
    routing.entropy_weight = 0.01

    head.graph = graph = ConfigDict()  # ml_gcn, add_gcn
    graph.hidden = 1024
    graph.threshold = 0.4  # ml_gcn: an edge where p(j | i) is at least this
    graph.share = 0.2  # ml_gcn: weight of a label's neighbours beside its own
    graph.transpose = True  # ml_gcn: as the authors' code has it; False: as the paper's formula reads
    graph.word_vectors = ""  # ml_gcn: a text file of word vectors such as GloVe's; "" = from the training labels
    graph.vector_width = 300  # ml_gcn: of those from the training labels

    head.sequence = sequence = ConfigDict()  # cnn_rnn
    sequence.embedding = 64
    sequence.hidden = 512  # of the LSTM
    sequence.dropout = 0.5
    sequence.beam_width = 4
    sequence.max_labels = 20  # longest sequence in training and in search

    config.init_from = ""  # start from an official checkpoint (.pth, .npz, .safetensors), or from a run folder

    config.trainable = ((r"^backbone/", False), (r"", True))  # ordered (regex, bool) over parameter paths

    config.loss = loss = ConfigDict()
    loss.kind = "asymmetric"  # asymmetric | bce | focal | softmax (one known label an image)
    loss.gamma_neg = 2.0  # asymmetric: focusing of negatives; focal: the focusing of both
    loss.gamma_pos = 0.0
    loss.clip = 0.0  # asymmetric: probability margin of negatives
    loss.eps = 1e-5  # asymmetric: floor inside the logarithm
    loss.detach = True  # no gradient through the focal weight
    loss.positive_weight = 1.0  # bce: factor on positives; 0 = negatives/positives of each training label
    loss.reduce = "mean"  # mean | sum over images and labels
    loss.scale = 1000.0
    loss.terms = terms = ConfigDict({"logits": 1.0})  # weights of what the head gives; logits: any head
    terms.cls = terms.patches = 0.0  # linear
    terms.map = terms.graph = 0.0  # add_gcn
    terms.co = terms.dc = terms.co_gate = terms.dc_gate = 0.0  # group_experts

    config.optim = optim = ConfigDict()
    optim.name = "adamw"  # adamw | adam (decay added to the gradient) | sgd | muon
    optim.learning_rate = 1e-3
    optim.schedule = "one_cycle"  # one_cycle (torch's, cycling beta1) | cosine | constant | multi_step
    optim.warmup_steps = 0  # all but one_cycle: a linear rise from 0
    optim.milestones = (0.6, 0.8)  # multi_step: shares of the training after which the rate falls
    optim.milestone_factor = 0.1  # multi_step: by which it falls
    optim.weight_decay = 1e-2
    optim.b1 = 0.9  # overridden by one_cycle's cycle 0.95 → 0.85 → 0.95
    optim.b2 = 0.999
    optim.eps = 1e-8
    optim.clip_norm = 0.0  # of the trainable gradients together; 0 = off
    optim.rate_rules = ()  # ordered (regex, factor) over parameter paths
    optim.decay_rules = ()  # ordered (regex, factor) over parameter paths
    optim.muon_rules = ((r"^backbone/.*/kernel$", True), (r"", False))  # muon: which matrices; AdamW moves the rest

    config.ema = ema = ConfigDict()
    ema.decay = 0.9997  # a step; 0 = no moving average is reported

    config.train = train = ConfigDict()
    train.epochs = 40
    train.batch_size = 64  # over all devices
    train.accumulate = 1  # parts of a batch, worked off one after the other: less memory; for batch_norm=trainable its
    #                       statistics are of a part
    train.log_every = 20  # steps
    train.patience = 0  # stop after more than this many evaluations without a better raw or EMA mAP; 0 = off
    train.save_backbone = False  # write backbone.safetensors (float16) at the end

    config.eval = evaluation = ConfigDict()
    evaluation.batch_size = 256  # on each device, so that scores do not depend on how many there are
    evaluation.every_epochs = 1
    evaluation.select_on = "val"  # val | test (as the papers do) | none (the last EMA weights)
    evaluation.threshold = 0.5  # on probabilities, for CP CR CF1 OP OR OF1 and for predict

    config.metrics = metrics = ConfigDict()
    metrics.preset = "none"  # also what one paper's evaluator prints: none | mlvpt | q2l | mlgcn | asl | drmoe
    metrics.top_k = 3  # labels an image returns in mAP@k and @topk
    metrics.top_k_minimum = 0.5  # the score that they also need in @topk_min
    metrics.calibration_bins = 15  # of equal width
    metrics.pair_level = (
        0.4  # co-occurrence overfitting is measured on pairs (a, b) with p(b | a) from here in training
    )
    metrics.pair_support = 20  # training images that must show both
    metrics.pair_images = 10  # evaluated images that must lie behind each of its figures

    config.thresholds = cuts = ConfigDict()  # --mode=thresholds
    cuts.split = ""  # the split to fit on, none that is reported; "" = data.val_split
    cuts.per = "class"  # class | global (one for all labels)
    cuts.goal = "f1"  # f1 (the largest) | precision (the lowest threshold that reaches thresholds.precision)
    cuts.precision = 0.9  # goal=precision: the share of given labels that are right, on the split

    config.report = report = ConfigDict()
    report.samples = 0  # images, at most 64, kept in samples/ with gates and attention, for the report page; 0 = none
    report.sample_side = 224  # pixels, at most, of their longer side

    config.log = log = ConfigDict()  # besides metrics.jsonl and metrics.csv in the run folder
    log.tensorboard = True  # event files, for `tensorboard --logdir`
    log.wandb = ""  # a project of Weights & Biases (pip install wandb); "" = off

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every_epochs = 1.0
    checkpoint.keep = 2
    checkpoint.include_frozen = "auto"  # auto (unless a published file has them) | always | never

    config.pack = pack = ConfigDict()  # --mode=pack
    pack.shard_images = 1024  # images a shard
    pack.short_side = 0  # pixels; larger images are stored smaller, as JPEG; 0 = every file as it is
    pack.quality = 95  # of those JPEGs
    pack.processes = 0  # that read and write; 0 = one a core

    config.prune = prune = ConfigDict()  # --mode=prune, for the prompts of E2VPT
    prune.token_levels = tuple(step / 10 for step in range(1, 10))  # shares of the prompts to mask
    prune.segment_levels = tuple(step / 10 for step in range(1, 10))  # shares of every prompt's segments to mask
    prune.keep_segments = 4  # at least, of each prompt
    prune.importance = "signed"  # mean gradient of a mask: signed (code) | absolute (paper)

    config.mesh = mesh = ConfigDict()  # devices along each axis; -1 = all that remain
    mesh.data = -1
    mesh.fsdp = 1
    mesh.expert = 1
    return config
